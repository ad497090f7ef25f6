"""What the pages of all studies end with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from wordrun import files
from wordrun.errors import UserError
from wordrun.study.points import DONE
from wordrun.study.table import markdown

Row = Mapping[str, str]


def write_page(page: Path, lines: Sequence[str], rows: Sequence[Row], command: Sequence[str]) -> None:
    """Write ``lines``, the points without a result, and where and how the others were measured.

    Raises:
        UserError: the file cannot be written.
    """
    lines, done = list(lines), [row for row in rows if row["state"] == DONE]
    if others := [[row["point"], row["state"], row["reason"]] for row in rows if row["state"] != DONE]:
        lines += ["## Points without a result", "", markdown(("point", "state", "reason"), others, text=3), ""]
    lines += ["## Conditions", ""]
    for name in ("device", "site", "hosts", "commit", "versions"):
        if values := list(dict.fromkeys(row[name] for row in done if row[name])):
            lines.append(f"- {name}: {', '.join(values)}")
    lines += [f"- command: `{shlex.join(command)}`", f"- options of {done[0]['point']}: `{done[0]['overrides']}`", ""]
    try:
        files.replace(page, "\n".join(lines))
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror}; start the study again to write it") from None
