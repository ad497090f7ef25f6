"""Prompts and answers: sequences of complete pairs, with a loss on the answers alone.

Each token id in shards of pairs has two flags: whether a pair starts there, and whether the token is predicted, because
it belongs to an answer or ends one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from wordrun.common.errors import ConfigError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.data.batch import Batch
from wordrun.data.shards import ANSWER, START, Array, plain

IGNORED = -100
"""Target without a loss: the default ignore_index of torch's cross entropy."""
READ = 2**22
"""Tokens to read at once."""


class PairSequences:
    """Sequences of complete pairs; a pair that is longer than a sequence is truncated.

    Args:
        tokens: the pairs, with flags.
        block_size: T, the length of a sequence.
        eot: the end-of-text token, which also pads sequences.
        several: put as many consecutive pairs into a sequence as fit; false: one pair.
        split: train or val, for messages.

    Pairs of which no predicted token would be left, because the prompt fills the sequence, are left out.

    Raises:
        ConfigError: these are all pairs.
    """

    def __init__(self, tokens: Array, block_size: int, eot: int, *, several: bool, split: str = "train") -> None:
        self.tokens, self.block_size, self.eot, self.several = tokens, block_size, eot, several
        ends = np.append(_starts(tokens)[1:], len(tokens))
        starts, pair = [], 0
        while pair < len(ends):
            starts.append(int(ends[pair - 1]) if pair else 0)
            fits = int(np.searchsorted(ends, starts[-1] + block_size, "right")) if several else 0
            pair = max(pair + 1, fits)
        self._starts = np.array(starts, dtype=np.int64)
        self._lengths = np.diff(self._starts, append=len(tokens))
        kept = self._with_answer(len(ends), split)
        self._starts, self._lengths = self._starts[kept], self._lengths[kept]
        self._counts = np.full(len(self._starts), -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def _with_answer(self, pairs: int, split: str) -> NDArray[np.bool_]:
        """Return which sequences have a predicted token, and warn of pairs that lose the end or all of their answer."""
        kept, prompts = np.full(len(self._starts), True), [0]
        too_long = np.flatnonzero(self._lengths > self.block_size)
        for number in too_long.tolist():
            start, length = int(self._starts[number]), int(self._lengths[number])
            answer = np.flatnonzero(self.tokens[start + 1 : start + length] & ANSWER)
            prompts.append(int(answer[0]) + 1 if len(answer) else length)  # with the end-of-text token before it
            kept[number] = prompts[-1] <= self.block_size
        cut, block = int((~kept).sum()), f"model.block_size={self.block_size}"
        longest = f"the longest prompt has {max(prompts):,} tokens"
        if not kept.any():
            raise ConfigError(
                f"{block} leaves no answer of any of the {pairs:,} pairs for {split}: {longest}. Raise "
                f"model.block_size to more than {max(prompts):,}, or shorten the prompts",
                page="finetune.md#fine-tune",
            )
        if len(too_long):
            LOGGER.warning(
                "%s cuts %d of the %d pairs for %s: %d lose the end of the answer, and %d, which are left out, all of "
                "it (%s)",
                *(block, len(too_long), pairs, split, len(too_long) - cut, cut, longest),
                extra=FIRST_RANK,
            )
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
        row = np.full(self.block_size + 1, self.eot, dtype=np.uint32)
        part = self.tokens[start : start + min(length, len(row))]
        row[: len(part)] = part
        if length < len(row):
            row[length] |= START | ANSWER  # the end of the last answer
        return row


def _starts(tokens: Array) -> NDArray[np.int64]:
    """Return the positions where pairs start."""
    found = [np.flatnonzero(tokens[at : at + READ] & START) + at for at in range(0, len(tokens), READ)]
    return np.concatenate(found)
