"""Data sets of the Hugging Face Hub, by name or from a local folder, read as streams through ``datasets``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from wordrun.config import DataConfig
from wordrun.errors import ConfigError, UserError

if TYPE_CHECKING:
    from wordrun.data.documents import Piece

PROBE_S = 5
"""Seconds that the hub has for an answer."""
ROWS = 50_000
"""Rows of a piece of a data set that is on this machine as a table."""


def _folder(data: DataConfig) -> Path | None:
    """Return the local folder that data.dataset names, if it does."""
    path = Path(os.path.expanduser(str(data.dataset)))
    return path if path.is_dir() else None


def open_dataset(data: DataConfig) -> Any:
    """Return the data set as a stream, or as a table if it lies here as ``save_to_disk`` writes it.

    Raises:
        UserError: it is neither here nor can it be reached; the message has the recipe for a login node.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data={data.name} needs datasets: pip install 'wordrun[hf]'") from None
    datasets.disable_progress_bars()
    folder = _folder(data)
    if folder is None and not reachable():
        from huggingface_hub import constants

        # What is in its cache can be had; for the rest its client would try five times, for half a minute.
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        if folder is not None and any(folder.glob("**/state.json")):
            table = datasets.load_from_disk(str(folder))
            if isinstance(table, datasets.DatasetDict):
                table = table[data.split]
            return table
        return datasets.load_dataset(
            str(folder or data.dataset), name=data.subset, split=data.split, revision=None if folder else data.revision,
            streaming=True,
        )  # fmt: skip
    except (KeyError, ValueError, FileNotFoundError) as error:
        if folder is None and _is_offline(error):
            raise _unreachable(data, error) from None
        raise ConfigError(f"data.dataset={data.dataset} cannot be opened: {_line(error)}") from None
    except Exception as error:  # whatever the hub's client, the proxy or the socket came up with
        raise _unreachable(data, error) from None


def pieces(data: DataConfig) -> list[tuple[str, str, int, int, int]]:
    """Return kind, name, start, stop and size of the pieces: the files of a stream, or runs of a table's rows."""
    whole = open_dataset(data)
    columns = whole.column_names
    if columns is not None and data.text_key not in columns:
        raise ConfigError(
            f"data.dataset={data.dataset} has no column data.text_key={data.text_key}, but {', '.join(columns)}"
        )
    name = str(data.dataset)
    if hasattr(whole, "num_shards") and not hasattr(whole, "__len__"):
        return [("hf", name, part, part + 1, 0) for part in range(whole.num_shards)]
    rows = len(whole)
    return [("hf", name, start, min(start + ROWS, rows), 0) for start in range(0, rows, ROWS)]


def texts(piece: Piece, data: DataConfig) -> Iterator[str]:
    """Yield the texts of ``piece``."""
    whole = open_dataset(data)
    if hasattr(whole, "__len__"):
        part = whole.select_columns([data.text_key]).select(range(piece.start, piece.stop))
    else:
        part = whole.shard(num_shards=whole.num_shards, index=piece.start)
    try:
        for row in part:
            text = row.get(data.text_key)
            if text is not None and not isinstance(text, str):
                raise ConfigError(
                    f"data.dataset={data.dataset}: data.text_key={data.text_key} holds {type(text).__name__}, not text"
                )
            yield text or ""
    except UserError:
        raise
    except Exception as error:
        if _folder(data) is None:
            raise _unreachable(data, error) from None
        raise ConfigError(f"data.dataset={data.dataset} cannot be read: {_line(error)}") from None


@cache
def reachable() -> bool:
    """Say whether the hub answers; a proxy, which alone may know it, is trusted to."""
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    where = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((where.hostname, where.port or 443), timeout=PROBE_S):
            return True
    except OSError:
        return False


def revision(data: DataConfig) -> str | None:
    """Return the commit of a data set of the hub that data.revision names now; None: nobody can be asked."""
    if _folder(data) is not None or not reachable():
        return data.revision
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(str(data.dataset), revision=data.revision, timeout=10).sha
    except Exception:  # that it cannot be reached is said when its data are asked for
        return data.revision


def _is_offline(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(sign in text for sign in ("offline", "connect", "couldn't reach", "resolve", "network", "hub"))


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:200]


def _unreachable(data: DataConfig, error: BaseException) -> UserError:
    subset = f" data.subset={data.subset}" if data.subset else ""
    return UserError(
        f"data={data.name}: the Hugging Face data set {data.dataset} cannot be had from here ({_line(error)}). On a "
        "machine with a network (a login node), with the same $WORDRUN_DATA_HOME: python -m wordrun.prepare "
        f"data={data.name}; or copy it by: hf download --repo-type dataset {data.dataset} --local-dir DIR, and prepare "
        f"here with data.dataset=DIR{subset}."
    )
