"""What the website adds to docs/: the commands' help, and the files of the repository to which pages link.

A page of docs/ links to ``../src/wordrun/devices.py`` or ``../benchmarks/results/``, which works on GitHub. On the
website, these files are pages below ``repository/``. Mistakes that Python-Markdown does not report are warnings here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from mkdocs.structure.files import File, Files
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?![a-z]+:|#|<)([^)#\s]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^( *)(`{3,})(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"
log = logging.getLogger("mkdocs.hooks.wordrun")


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands and, one after the other, the files that pages link to."""
    files.append(File.generated(config, "commands.md", content=commands()))  # replaces the file of this name
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    seen = set()
    while waiting:
        path, text = waiting.pop()
        for target in targets(path, text):
            if target in seen or site_path(target) == target.removeprefix("docs/") or not (ROOT / target).exists():
                continue
            seen.add(target)
            if (ROOT / target).suffix in (".png", ".svg"):
                file = File.generated(config, site_path(target), abs_src_path=str(ROOT / target))
            else:
                text = page_of(target)
                file = File.generated(config, site_path(target), content=text)
                waiting.append((repository_path(site_path(target)), text))
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to the pages made of these files, and check code blocks."""
    source = repository_path(page.file.src_uri)
    for indent, _ticks, block in FENCE.findall(markdown):
        language = block.partition("\n")[0].strip().partition(" ")[0]
        try:
            get_lexer_by_name(language or "text")
        except ClassNotFound:
            log.warning("%s: a code block is in '%s', which Pygments does not know", source, language)
        if indent and len(indent) % 4:
            log.warning("%s: a code block is indented by %s spaces: use a multiple of 4", source, len(indent))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if not (ROOT / target).exists():
            return match[0]  # mkdocs reports it
        return match[1] + os.path.relpath(site_path(target), posixpath.dirname(page.file.src_uri)) + match[3]

    return "".join(LINK.sub(moved, part) if text else part for text, part in parts(markdown))


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warn if GitHub would show other lists, tables or code blocks: Python-Markdown wants blank lines and indents."""
    if page.file.src_uri.startswith(("repository/", "api")):
        return
    theirs = MarkdownIt("gfm-like", {"linkify": False}).render(page.markdown)
    for tag in ("li", "table", "pre"):
        here, there = (
            len(re.findall(rf"<{tag}[ >]", re.sub(r"<table class=\"highlight.*?</table>", "", text)))
            for text in (html, theirs)
        )
        if here != there:
            log.warning("%s: %s <%s> here, %s on GitHub", page.file.src_uri, here, tag, there)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script with which the search works on pages opened from a disk from here, not from another host."""
    return output.replace(SHIM, os.path.relpath("search.js", posixpath.dirname(page.file.src_uri)))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page that a missing page shows."""
    return output_content.replace(SHIM, "search.js")


def parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yield a page's pieces in order: whether it is text (rather than a code block), and the piece."""
    end = 0
    for match in FENCE.finditer(markdown):
        yield True, markdown[end : match.start()]
        yield False, match[0]
        end = match.end()
    yield True, markdown[end:]


def targets(path: str, markdown: str) -> list[str]:
    """Return the files of the repository that the page at ``path`` links to."""
    found = [match[2] for text, part in parts(markdown) if text for match in LINK.finditer(part)]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in found]


def site_path(path: str) -> str:
    """Return where the website has a file of the repository."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    return f"repository/{path}" if path.endswith((".md", ".png", ".svg")) else f"repository/{path}.md"


def repository_path(uri: str) -> str:
    """Return the repository's file of a page of the website: the inverse of ``site_path``."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def page_of(path: str) -> str:
    """Return a page that shows a file, or the pages of a folder."""
    file = ROOT / path
    if file.is_dir():
        pages = "".join(f"- [{each.name}]({each.name})\n" for each in sorted(file.glob("*.md"), reverse=True))
        return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{pages}"
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}.get(file.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n````{language}\n{text}````\n"


def commands() -> str:
    """Return the page of commands, from their own help."""
    sys.path.insert(0, str(ROOT / "src"))
    from wordrun.cli import COMMANDS

    page = ["# Commands\n\nThe commands' own help, as `launch --help` and `wordrun COMMAND --help` print it.\n"]
    calls = {"launch": ("wordrun.launch.cli", ["--help", "all"]), "wordrun": ("wordrun.cli", ["--help"])}
    calls |= {f"wordrun {name}": ("wordrun.cli", [name, "--help"]) for name in COMMANDS}
    for name, (module, arguments) in calls.items():
        page.append(f"\n## {name}\n\n````text\n{output(module, arguments)}````\n")
    return "".join(page)


def output(module: str, arguments: list[str]) -> str:
    """Return what a command prints."""
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            __import__(module, fromlist=["main"]).main(arguments)
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines()) + "\n"
