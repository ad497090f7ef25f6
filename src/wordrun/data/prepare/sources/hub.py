"""Hugging Face data sets, from the hub or a local folder, streamed with ``datasets``."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.data import contents
from wordrun.data.contents import optional
from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources.base import BadRowError, Document, Source, WorkItem, required, state_of

PROBE_S = 5
"""Seconds to wait for an answer from the hub."""
CARDS = ("README.md", "dataset_info.json", "dataset_infos.json")
"""Files that describe a data set."""
ROWS = 50_000
"""Rows per work item of a data set stored locally as a table."""


class HubSource(Source):
    """The Hugging Face data set data.dataset."""

    @classmethod
    def locate(cls, data: TextConfig) -> HubSource:
        """Return the data set without opening it."""
        parts = [data.dataset, data.subset, data.split, data.revision and f"revision {data.revision}"]
        return cls(data, None, "Hugging Face dataset " + ", ".join(part for part in parts if part))

    def files(self) -> list[Path] | None:
        """Return the files if the data set is a local folder."""
        folder = _folder(self.data)
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder else None

    def left_out(self) -> list[str]:
        """Return the files in a local folder that are of no split according to ``datasets``, each with the reason."""
        return self._found[1]

    def files_read(self) -> str:
        """Return how many files of which types in a local folder are read, and which splits are not."""
        return self._found[0]

    @cached_property
    def _found(self) -> tuple[str, list[str]]:
        folder, files = _folder(self.data), self.files()
        if folder is None or files is None or any(folder.glob("**/state.json")):
            return "", []
        builder = optional("datasets", f"data={self.data.name}").load_dataset_builder(str(folder), self.data.subset)
        splits = {str(split): len(paths) for split, paths in builder.config.data_files.items()}
        split_of = {
            os.path.realpath(path): str(split) for split, paths in builder.config.data_files.items() for path in paths
        }
        wanted, read, left_out = re.findall(r"[\w.]+", str(self.data.split)), list[str](), list[str]()
        for path in files:
            if any(map(contents.is_litter, path.relative_to(folder).parts)) or path.name in CARDS:
                continue
            split = split_of.get(os.path.realpath(path))
            if split in wanted:
                read.append(contents.by_name(path.name).type or path.suffix or "other")
            elif split is None:
                left_out.append(f"{path} (datasets reads the {builder.name} files of this folder)")
        others = [f"{split} ({count:,})" for split, count in splits.items() if split not in wanted]
        more = f", and not the files of the splits {', '.join(others)}" if others else ""
        return f"{contents.described(read)} of the split {self.data.split}{more}", left_out

    def state(self) -> str | None:
        """Return a hash of the files if the data set is a local folder; it does not depend on the folder's path."""
        folder, files = _folder(self.data), self.files()
        return state_of(files, folder) if folder and files is not None else None

    def revision(self) -> str | None:
        """Return the commit that data.revision currently refers to; without access to the hub, data.revision itself."""
        data = self.data
        if _folder(data) is not None:
            return self.state()
        if not reachable():
            return data.revision
        try:
            from huggingface_hub import HfApi

            return HfApi().dataset_info(str(data.dataset), revision=data.revision, timeout=10).sha
        except Exception:  # an unreachable hub is reported when the data is read
            return data.revision

    def items(self) -> list[WorkItem]:
        """Return the shards of a stream, or row ranges of a table."""
        dataset, data = open_dataset(self.data), self.data
        columns = dataset.column_names
        if columns is not None and data.text_key not in columns:
            raise ConfigError(
                f"data.dataset={data.dataset} has no column data.text_key={data.text_key}, only {', '.join(columns)}"
            )
        if hasattr(dataset, "__len__"):
            spans = [(start, min(start + ROWS, len(dataset))) for start in range(0, len(dataset), ROWS)]
        else:
            spans = [(shard, shard + 1) for shard in range(dataset.num_shards)]
        return [WorkItem(number, "hf", str(data.dataset), *span) for number, span in enumerate(spans)]

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the texts of ``item``."""
        for number, text in enumerate(_texts(item, self.data), 1):
            try:
                yield Document(
                    required(text, f"data.dataset={self.data.dataset} (row {number} of work item {item.number})")
                )
            except BadRowError as error:
                yield error.as_document()


def _folder(data: TextConfig) -> Path | None:
    """Return data.dataset as a path if it is a local folder, else None."""
    path = Path(str(data.dataset)).expanduser()
    return path if path.is_dir() else None


def open_dataset(data: TextConfig) -> Any:
    """Return the data set as a stream, or as a table if it is a folder written by ``save_to_disk``.

    Raises:
        UserError: if it is neither local nor reachable; the message says what to do on a login node.
    """
    datasets = optional("datasets", f"data={data.name}")
    datasets.disable_progress_bars()
    folder = _folder(data)
    if folder is None and not reachable():
        from huggingface_hub import constants

        # The cache still works; for anything else the client would retry for half a minute.
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        if folder is not None and any(folder.glob("**/state.json")):
            table = datasets.load_from_disk(str(folder))
            return table[data.split] if isinstance(table, datasets.DatasetDict) else table
        name, revision = str(folder or data.dataset), None if folder else data.revision
        return datasets.load_dataset(name, data.subset, split=data.split, revision=revision, streaming=True)
    except (KeyError, ValueError, FileNotFoundError) as error:
        if folder is None and _is_offline(error):
            raise _unreachable(data, error) from None
        raise ConfigError(f"data.dataset={data.dataset} cannot be opened: {first_line(error)}") from None
    except Exception as error:  # any error from the hub client, proxy or socket
        raise _unreachable(data, error) from None


def _texts(item: WorkItem, data: TextConfig) -> Iterator[str | None]:
    dataset = open_dataset(data)
    if hasattr(dataset, "__len__"):
        part = dataset.select_columns([data.text_key]).select(range(item.start, item.stop))
    else:
        part = dataset.shard(num_shards=dataset.num_shards, index=item.start)
    try:
        for row in part:
            text = row.get(data.text_key)
            if text is not None and not isinstance(text, str):
                raise ConfigError(
                    f"data.dataset={data.dataset}: data.text_key={data.text_key} holds {type(text).__name__}, not text"
                )
            yield text
    except UserError:
        raise
    except Exception as error:
        if _folder(data) is None:
            raise _unreachable(data, error) from None
        raise ConfigError(f"data.dataset={data.dataset} cannot be read: {first_line(error)}") from None


@cache
def reachable() -> bool:
    """Return whether the hub answers; a configured proxy is assumed to reach it."""
    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((url.hostname, url.port or 443), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _is_offline(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(sign in text for sign in ("offline", "connect", "couldn't reach", "resolve", "network", "hub"))


def _unreachable(data: TextConfig, error: BaseException) -> UserError:
    subset = f" data.subset={data.subset}" if data.subset else ""
    return UserError(
        f"data={data.name}: the Hugging Face dataset {data.dataset} could not be downloaded ({first_line(error)}). On "
        "a machine with network access, such as a login node: hf download --repo-type dataset "
        f"{data.dataset} --local-dir DIR; then prepare here with data.dataset=DIR{subset}. Or prepare there, with the "
        f"same $WORDRUN_DATA_HOME: wordrun prepare data={data.name} (on a login node with data.workers=4); where the "
        "nodes of other jobs have network access, launch --submit -N 1 --walltime 1:00:00 --queue QUEUE --account "
        f"PROJECT -- wordrun prepare data={data.name}"
    )
