"""Random numbers in a model's losses, such as noise: in an evaluation, each example has its own generator."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from wordrun.common.errors import UserError

_generators: ContextVar[list[torch.Generator] | Sequence[int]] = ContextVar("generators", default=())
"""Of the examples of the batch that is evaluated, or their numbers until the first draw; empty: none is evaluated."""


@contextlib.contextmanager
def for_examples(numbers: Sequence[int]) -> Iterator[None]:
    """Within a ``with`` block, let ``draw`` draw for the validation examples of these ``numbers``, a batch."""
    outer = _generators.set(numbers)
    try:
        yield
    finally:
        _generators.reset(outer)


def draw(like: Tensor, function: Callable[..., Tensor] = torch.randn) -> Tensor:
    """Return random numbers of the shape, the type and the device of ``like``, (B, ...), for a batch of B examples.

    In an evaluation, what an example gets depends only on its number in the validation set, so that evaluations of the
    same weights are equal on every layout. Otherwise, torch's generator of this rank draws them.

    Args:
        like: has a row for each example of the batch.
        function: takes a shape, and the keywords dtype, device and generator, such as torch.randn and torch.rand, or
            ``functools.partial(torch.randint, 0, 10)``.

    Raises:
        UserError: in an evaluation, ``like`` has not a row for each example.
    """
    generators = _generators.get()
    if not generators:
        return function(like.shape, dtype=like.dtype, device=like.device)
    if like.dim() == 0 or len(like) != len(generators):
        raise UserError(
            f"draw: like should have a row for each of the {len(generators)} examples of the batch, not the shape "
            f"{list(like.shape)}"
        )
    if isinstance(generators, range):
        generators = [_generator(number) for number in generators]
        _generators.set(generators)
    # On the CPU, so that all kinds of devices get the same numbers.
    rows = [function(like.shape[1:], dtype=like.dtype, device="cpu", generator=each) for each in generators]
    return torch.stack(rows).to(like.device)


def _generator(number: int) -> torch.Generator:
    digest = hashlib.blake2b(f"validation/{number}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))
