"""Where the text comes from: a file, a download with a checked hash, or the embedded sample."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from wordrun.config import DataConfig
from wordrun.data.sample import sample_text
from wordrun.errors import ConfigError, UserError
from wordrun.log import LOGGER

# A machine without a network should say so soon, not after a minute of retries.
DOWNLOAD_TIMEOUT_S = 10


@dataclass(frozen=True)
class Source:
    """A text that has been found: what every rank needs to read it."""

    path: str | None
    """The file; None: the embedded sample."""
    origin: str
    """Where it came from, for people and for run.json."""
    banner: str | None = None
    """What everyone who looks at the results must know, if the text is not the one that was asked for."""


def locate(data: DataConfig) -> Source:
    """Find the text of ``data``, downloading it if need be; one rank calls this and shares the result.

    Raises:
        UserError: it can be had neither from its path nor from its address.
    """
    if data.kind == "hf":
        parts = [data.dataset, data.subset, data.split, data.revision and f"revision {data.revision}"]
        return Source(None, "Hugging Face data set " + ", ".join(part for part in parts if part))
    if data.kind == "sample":
        return Source(None, "embedded sample, made by a seeded generator")
    assert data.path is not None  # config.check
    path = Path(os.path.expanduser(data.path)).absolute()
    if data.kind in ("file", "shards"):
        return Source(str(path), str(path))
    if path.exists():
        _check_hash(path, data)
        return Source(str(path), str(path))
    LOGGER.info("downloading %s to %s", data.url, path)
    try:
        _download(data, path)
    except Exception as error:  # whatever the network, the proxy or the disk came up with
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        if data.offline == "error":
            raise UserError(
                f"data={data.name} is neither at {path} nor to be had from {data.url} ({reason}). "
                f"On a machine with a network (a login node): curl -o {path} --create-dirs {data.url}; "
                "or use data=sample."
            ) from None
        return Source(
            None, "embedded sample, made by a seeded generator",
            banner=(
                f"NOT TRAINING ON {data.name.upper()}: {data.url} cannot be had ({reason}), so this run uses the "
                "embedded sample text instead. Losses cannot be compared. "
                f"Put the file at {path}, or set data.offline=error."
            ),
        )  # fmt: skip
    return Source(str(path), str(data.url))


def read(source: Source) -> str:
    """Return the text of ``source``.

    Raises:
        ConfigError: the file is missing, unreadable, empty or not UTF-8.
    """
    if source.path is None:
        return sample_text()
    try:
        text = Path(source.path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={source.path} is not UTF-8 text (byte {error.start}): convert it, for example by "
            f"iconv -f latin1 -t utf-8 {source.path}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"data.path={source.path} cannot be read: {error.strerror}. Name a text file that you may read"
        ) from None
    if not text.strip():
        raise ConfigError(f"data.path={source.path} is empty: name a file with text, or use data=sample")
    return text


def _check_hash(path: Path, data: DataConfig) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. It should be the text of data={data.name}"
        ) from None
    if data.sha256 and found != data.sha256:
        raise ConfigError(
            f"{path} is not {data.name}: its sha256 is {found}, expected {data.sha256}. "
            f"Remove it to download it again, or use it as it is by data=text data.path={path}"
        )


def _download(data: DataConfig, path: Path) -> None:
    import pooch

    assert data.url is not None
    pooch.get_logger().setLevel("WARNING")
    pooch.retrieve(
        data.url,
        known_hash=f"sha256:{data.sha256}",
        fname=path.name,
        path=path.parent,
        downloader=pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT_S),
    )
