"""Sources of text; each kind is a class in a file here and a line in ``config.PARTS``."""

from __future__ import annotations

from wordrun.config import PARTS, DataConfig
from wordrun.data import manifest
from wordrun.files import absolute
from wordrun.prepare.sources.base import Source


def locate(data: DataConfig) -> Source:
    """Return the source of ``data``, downloading it if need be; one rank calls this and shares the result.

    Once data.prepared is complete, its source is not needed any more and need not exist.

    Raises:
        UserError: it is neither on this machine nor can it be downloaded.
    """
    if data.prepared:
        folder = absolute(data.prepared)
        if manifest.is_complete(folder):
            return Source(data, str(folder), str(folder))
    source: Source = PARTS["data"][data.kind].load().locate(data)
    return source
