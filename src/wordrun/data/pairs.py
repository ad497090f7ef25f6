"""Prompts and answers: sequences of complete pairs, with a loss on the answers alone.

A conversation is a pair with several answers. Each token id in shards of pairs has two flags: whether a pair starts
there, and whether the token is predicted, because it belongs to an answer or ends one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.data.batch import Batch
from wordrun.data.options import TextConfig
from wordrun.data.shards import ANSWER, START, Array, plain

IGNORED = -100
"""Target without a loss: the default ignore_index of torch's cross entropy."""
READ = 2**22
"""Tokens to read at once."""


class PairSequences:
    """Sequences of complete pairs; a pair that is longer than a sequence is left out or truncated.

    Args:
        tokens: the pairs, with flags.
        block_size: T, the length of a sequence.
        pad: the token that pads sequences, with the flag ANSWER if it also ends the last answer.
        data: the options of data: mask_documents puts as many consecutive pairs into a sequence as fit.
        split: train or val, for messages.

    Pairs of which no predicted token would be left are left out.

    Raises:
        ConfigError: these are all pairs.
    """

    def __init__(self, tokens: Array, block_size: int, pad: int, data: TextConfig, *, split: str = "train") -> None:
        self.tokens, self.block_size, self.pad, self.several = tokens, block_size, pad, data.mask_documents
        ends = np.append(_starts(tokens)[1:], len(tokens))
        starts, pair = [], 0
        while pair < len(ends):
            starts.append(int(ends[pair - 1]) if pair else 0)
            fits = int(np.searchsorted(ends, starts[-1] + block_size, "right")) if self.several else 0
            pair = max(pair + 1, fits)
        self._starts = np.array(starts, dtype=np.int64)
        self._lengths = np.diff(self._starts, append=len(tokens))
        kept = self._kept(len(ends), data, split)
        self._starts, self._lengths = self._starts[kept], self._lengths[kept]
        self._counts = np.full(len(self._starts), -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def _kept(self, pairs: int, data: TextConfig, split: str) -> NDArray[np.bool_]:
        """Return which sequences are used, and warn of pairs that are too long."""
        too_long = np.flatnonzero(self._lengths > self.block_size)
        kept, block = np.full(len(self._starts), True), f"model.block_size={self.block_size}"
        of = f"of the {pairs:,} {'conversations' if data.kind == 'chat' else 'pairs'} for {split}"
        if data.too_long == "drop":
            kept[too_long] = False
            needed = int(self._lengths[too_long].min(initial=0))
            found = f"the longest has {self._lengths.max():,} tokens"
            remedy, counts = ", or use data.too_long=truncate", f"all {len(too_long)} are skipped"
        else:
            prompts = [0]
            for number in too_long.tolist():
                start, length = int(self._starts[number]), int(self._lengths[number])
                answer = np.flatnonzero(self.tokens[start + 1 : start + length] & ANSWER)
                prompts.append(int(answer[0]) + 1 if len(answer) else length)  # with the first token
                kept[number] = prompts[-1] <= self.block_size
            cut, needed = int((~kept).sum()), max(prompts) + 1
            found, remedy = f"the longest prompt has {max(prompts):,} tokens", ", or shorten the prompts"
            counts = f"{len(too_long) - cut} lose the end of the answer, and {cut}, which are skipped, all of it"
        if not kept.any():
            raise ConfigError(
                f"{block} leaves no answer of any {of}: {found}. Raise model.block_size to {needed:,} or more{remedy}",
                page="finetune.md#fine-tune",
            )
        if len(too_long):
            found = f"data.too_long={data.too_long}; {found}"
            LOGGER.warning("%s: %d %s are too long: %s (%s)", block, len(too_long), of, counts, found, extra=FIRST_RANK)
        return kept

    def empty(self, size: int, *, pinned: bool = False) -> Batch:
        """Return an uninitialized batch of ``size`` sequences; the caller sets its ``scale``."""
        batch = Batch.empty(size, self.block_size, pinned=pinned)
        pairs = torch.empty_like(batch.tokens, pin_memory=pinned) if self.several else None
        return replace(batch, scale=torch.empty((), pin_memory=pinned), pairs=pairs)

    def fill(self, batch: Batch, numbers: NDArray[np.int64]) -> None:
        """Overwrite the tokens, targets and documents of ``batch`` with the sequences ``numbers``."""
        for i, number in enumerate(numbers.tolist()):
            row = self._read(number)
            inputs, targets = row[:-1], row[1:]
            batch.tokens.numpy()[i] = plain(inputs)
            batch.targets.numpy()[i] = np.where(targets & ANSWER, plain(targets).astype(np.int64), IGNORED)
            if batch.pairs is not None:
                batch.pairs.numpy()[i] = ((inputs & START) > 0).cumsum()

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of predicted tokens in each of the sequences ``numbers``."""
        for number in set(numbers[self._counts[numbers] < 0].tolist()):
            self._counts[number] = np.count_nonzero(self._read(number)[1:] & ANSWER)
        return self._counts[numbers]

    def _read(self, number: int) -> NDArray[np.uint32]:
        """Return the inputs of a sequence and the target of its last token, with flags, (T + 1,)."""
        start, length = int(self._starts[number]), int(self._lengths[number])
        row = np.full(self.block_size + 1, self.pad, dtype=np.uint32)
        part = self.tokens[start : start + min(length, len(row))]
        row[: len(part)] = part
        row[length + 1 :] &= ~ANSWER
        if length < len(row):
            row[length] |= START  # and, with ANSWER, the end of the last answer
        return row


def _starts(tokens: Array) -> NDArray[np.int64]:
    """Return the positions where pairs start."""
    found = [np.flatnonzero(tokens[at : at + READ] & START) + at for at in range(0, len(tokens), READ)]
    return np.concatenate(found)
