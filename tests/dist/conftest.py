"""What the ranks of this tier import before they are forked, besides what all ranks do."""

from __future__ import annotations

import pytest

import forked

# By data=digits, and by DeepSpeed, which decorates a function with torch.compile: a second for each rank.
MORE = ("sklearn.datasets", "torch._inductor.compile_fx")


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    forked.preload(*MORE)
