"""Four texts of 1.1 million characters of different kinds, for benchmarks that must hold beyond tiny Shakespeare.

    python benchmarks/texts.py DIR

`shakespeare.txt` is the text on which wordrun's defaults were chosen. No value was chosen on the others: `manual.txt`
(Linux manual pages in roff), `german.txt` (quotations and short prose) and `code.txt` (Python source of Django). They
come from pinned packages of Debian and PyPI, fetched by `apt-get` and `pip`; each file is checked against its SHA-256.
What cannot be had (without apt, or before tiny Shakespeare has been downloaded) is left out, with a line.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from wordrun.config.compose import data_home

CHARACTERS = 1_115_394
"""Of each text: as many as tiny Shakespeare has."""


def debian(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file of a Debian package, by path."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, "files"], cwd=folder, check=True)
        root = Path(folder, "files")
        for file in sorted(root.rglob("*")):
            if file.is_file() and not file.is_symlink():
                yield str(file.relative_to(root)), file.read_bytes()


def wheel(requirement: str) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file of a wheel, by path."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, requirement, "-d", folder], check=True)
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as files:
            for name in sorted(files.namelist()):
                yield name, files.read(name)


def manual() -> Iterator[str]:
    """Yield Linux manual pages as source."""
    for path, content in debian("manpages=6.03-2"):
        if "/man/" in path and path.endswith(".gz"):
            yield gzip.decompress(content).decode()


def german() -> Iterator[str]:
    """Yield collections of German quotations, without the index files and duplicates in another encoding."""
    for path, content in debian("fortunes-de=0.35-1"):
        if "/games/fortunes/de/" in path and not path.endswith((".dat", ".u8")):
            yield content.decode()


def code() -> Iterator[str]:
    """Yield Python modules."""
    for path, content in wheel("django==5.1.4"):
        if path.endswith(".py") and "/locale/" not in path:
            yield content.decode()


def shakespeare() -> Iterator[str]:
    """Yield tiny Shakespeare."""
    yield Path(data_home(), "shakespeare", "input.txt").read_text()


TEXTS: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "shakespeare": (shakespeare, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "manual": (manual, "4b65ca67a62ab78df271c256936810fca7fa9ad1ef5fb65519eaf7ebf9b4d3e1"),
    "german": (german, "dd749026ed7f042506d3839d13cdeaa84293df4478155287d0f8a1a028773cf6"),
    "code": (code, "fefaf12a67aa7ff970afe9d416c7b826e23c5b0a0756d4f2c34def6ee287d48c"),
}
"""By name: what yields the text, and the SHA-256 of its first CHARACTERS characters."""


def write(name: str, folder: Path) -> Path:
    """Write text ``name`` to ``folder`` and return the file.

    Raises:
        ValueError: the package holds another text than the one that was measured.
    """
    source, expected = TEXTS[name]
    text = "\n".join(source())[:CHARACTERS]
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != expected:
        raise ValueError(f"{name}: SHA-256 {found}, not {expected}: the package has changed")
    file = folder / f"{name}.txt"
    file.write_text(text)
    print(f"{file}: {len(text):,} characters, {len(set(text))} distinct, {found}")
    return file


def main() -> None:
    """Write all texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        try:
            write(name, folder)
        except FileNotFoundError as error:
            print(f"{name}: left out, {error.filename} is missing", file=sys.stderr)


if __name__ == "__main__":
    main()
