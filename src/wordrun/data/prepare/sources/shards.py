"""Token shards prepared by other projects, to be rewritten in our format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wordrun.common.errors import UserError
from wordrun.data import foreign, shards
from wordrun.data.manifest import SPLITS
from wordrun.data.prepare.sources.base import Source, WorkItem
from wordrun.data.tokenizers.base import Tokenizer
from wordrun.data.tokenizers.options import TokenizerConfig


class ShardSource(Source):
    """The shards in the folder data.path."""

    is_tokens = True

    def files(self) -> list[Path]:
        """Return all files in the folder."""
        return sorted(Path(str(self.path)).iterdir())

    def items(self) -> list[WorkItem]:
        """Return a work item for each shard and split."""
        items: list[WorkItem] = []
        for split, tokens in zip(SPLITS, foreign.find_foreign(Path(str(self.path)), self.data), strict=True):
            for shard in tokens.shards:
                size = np.dtype(shard.dtype).itemsize
                start = (shard.offset - shards.examine(shard.path).offset) // size
                span = (start, start + shard.count, shard.count * size)
                items.append(WorkItem(len(items), split, shard.path, *span))
        return items

    def tokenizer(self, cfg: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer the shards were made with.

        Raises:
            UserError: if its vocabulary is missing.
        """
        tokenizer = foreign.foreign_tokenizer(Path(str(self.path)), cfg)
        if tokenizer.missing:
            raise UserError(tokenizer.missing)
        return tokenizer
