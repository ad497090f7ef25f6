"""Draw docs/quickstart.svg from a terminal's contents, such as those of bin/quickstart in tmux.

tmux new-session -x 80 -y 24 bin/quickstart; in another window: tmux capture-pane -ep -S -200 > screen
python docs/make_terminal.py < screen
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 80
# Without a font from another host, and without the buttons of a window.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect fill="#0d1117" width="{width}" height="{height}" rx="8"/>
<g transform="translate(9, 16)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(screen: str) -> str:
    """Return an SVG image of ``screen``, lines of text with ANSI colors."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in screen.rstrip().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    svg = console.export_svg(title="", code_format=FORMAT, unique_id="screen")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(__file__).with_name("quickstart.svg").write_text(draw(sys.stdin.read()))
