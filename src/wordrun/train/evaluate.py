"""The loss over the validation set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from wordrun.backend import Backend
from wordrun.data.fixed_set import FixedSet
from wordrun.dist.collectives import all_sum


@contextlib.contextmanager
def evaluation_mode(backend: Backend) -> Iterator[None]:
    """Put the model into evaluation mode within a ``with`` block."""
    training = backend.parts[0].training
    for part in backend.parts:
        part.eval()
    yield
    for part in backend.parts:
        part.train(training)


def mean_loss(backend: Backend, validation: FixedSet) -> float:
    """Return the mean loss over ``validation`` on all ranks; every rank must call this."""
    total = torch.zeros(2, dtype=torch.float64)
    with evaluation_mode(backend):
        for i in range(len(validation)):
            batch, weights = validation[i]
            losses = backend.losses(batch.to(backend.device))
            total += torch.stack(((losses.cpu().double() * weights).sum(), weights.sum()))
    loss_sum, count = all_sum(total.float().to(backend.device)).tolist()
    return float(loss_sum / count)
