"""Shards of tokens that were prepared elsewhere, to be rewritten in our own form."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wordrun.config import DataConfig, TokenizerConfig
from wordrun.data import corpus, shards
from wordrun.data.manifest import SPLITS
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.files import absolute
from wordrun.prepare.sources.base import Source, WorkItem, size_of, state_of


class ShardSource(Source):
    """The shards in the folder data.path."""

    is_tokens = True

    @classmethod
    def locate(cls, data: DataConfig) -> ShardSource:
        """Return the folder data.path."""
        path = str(absolute(str(data.path)))
        return cls(data, path, path)

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return Path(str(self.path))

    def size(self) -> int:
        """Return the size of all files in the folder."""
        return size_of(self.folder.iterdir())

    def state(self) -> str:
        """Return a hash of the names, sizes and times of all files in the folder."""
        return state_of(sorted(self.folder.iterdir()), Path("/"))

    def items(self) -> list[WorkItem]:
        """Return a work item for each shard and split."""
        items: list[WorkItem] = []
        for split, tokens in zip(SPLITS, corpus.find_foreign(self.folder, self.data), strict=True):
            for shard in tokens.shards:
                size = np.dtype(shard.dtype).itemsize
                start = (shard.offset - shards.examine(shard.path).offset) // size
                span = (start, start + shard.count, shard.count * size)
                items.append(WorkItem(len(items), split, shard.path, *span))
        return items

    def tokenizer(self, cfg: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer with which the shards were made."""
        return corpus.foreign_tokenizer(self.folder, cfg)
