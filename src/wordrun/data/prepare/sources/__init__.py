"""Sources of text; each kind is a class in this package and a line in ``wordrun.config.parts``."""

from __future__ import annotations

from wordrun.common.files import absolute
from wordrun.config.registry import part_of
from wordrun.data import manifest
from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources.base import Source


def locate(data: TextConfig) -> Source:
    """Return the source of ``data``, downloading it if necessary; one rank calls this and shares the result.

    Once data.prepared is complete, its source is no longer needed and may be deleted.

    Raises:
        UserError: if it is not on this machine and cannot be downloaded.
    """
    if data.prepared:
        folder = absolute(data.prepared)
        if manifest.is_complete(folder):
            return Source(data, str(folder), str(folder))
    part = part_of("data", data)
    with part.blamed():
        source: Source = part.load().locate(data)
    return source
