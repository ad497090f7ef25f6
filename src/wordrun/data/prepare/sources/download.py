"""A text file that is downloaded once and verified by its hash."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.common.files import absolute
from wordrun.common.log import LOGGER
from wordrun.data.contents import reject_special_file
from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources.base import Source
from wordrun.data.prepare.sources.files import FileSource
from wordrun.data.prepare.sources.sample import SampleSource

# Fail quickly without network access, not after a minute of retries.
TIMEOUT_S = 10


class DownloadSource(FileSource):
    """The file data.path, downloaded from data.url if it does not exist."""

    @classmethod
    def locate(cls, data: TextConfig) -> Source:
        """Return the file, or the sample instead if data.offline allows it."""
        assert data.path is not None  # checked by TextConfig.problems
        path = absolute(data.path)
        if path.exists():
            _check_hash(path, data)
            return cls(data, str(path), str(path))
        LOGGER.info("downloading %s to %s", data.url, path)
        try:
            import pooch

            pooch.get_logger().setLevel("WARNING")
            downloader = pooch.HTTPDownloader(timeout=TIMEOUT_S)
            pooch.retrieve(data.url, f"sha256:{data.sha256}", path.name, path.parent, downloader=downloader)
        except Exception as error:  # any error from the network, proxy or disk
            # requests' own message is the repr of an object, longer than the rest of this message.
            unreachable = type(error).__name__ in ("ConnectionError", "ConnectTimeout", "ReadTimeout")
            reason = f"no connection to {urlsplit(str(data.url)).hostname}" if unreachable else first_line(error)
            if data.offline == "error":
                raise UserError(
                    f"data={data.name} is not at {path} and could not be downloaded from {data.url} ({reason}). "
                    f"On a machine with network access (a login node): curl -o {path} --create-dirs {data.url}; "
                    "or use data=sample.",
                    page="data.md#sources",
                ) from None
            banner = (
                f"NOT TRAINING ON {data.name.upper()}: {data.url} could not be downloaded ({reason}), so this run uses "
                "the embedded sample text instead. Losses cannot be compared. "
                f"Put the file at {path}, or set data.offline=error."
            )
            return replace(SampleSource.locate(data), banner=banner)
        return cls(data, str(path), str(data.url))

    def splits(self) -> dict[Path, str]:
        """Return nothing, since there is only one file."""
        return {}

    def state(self) -> str | None:
        """Return the verified hash."""
        return self.data.sha256


def _check_hash(path: Path, data: TextConfig) -> None:
    try:
        reject_special_file(path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}. It should be the text of data={data.name}"
        raise ConfigError(message) from None
    if data.sha256 and found != data.sha256:
        raise ConfigError(
            f"{path} is not {data.name}: its sha256 is {found}, expected {data.sha256}. "
            f"Remove it to download it again, or use it as it is with data=text data.path={path}"
        )
