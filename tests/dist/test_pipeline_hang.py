"""A pipeline whose stage hangs says which ranks wait to send or receive, and for which rank."""

from __future__ import annotations

import re
from typing import Any

import pytest

import hanging

pytestmark = pytest.mark.timeout(120)
CULPRIT = """
def never_ends(module, inputs):
    time.sleep(1000)  # stage

class Culprit(Hook):
    def after_step(self, trainer):
        if trainer.step == 2:
            reach()
        if trainer.step == 2 and trainer.world.rank == int(kind):
            next(iter(trainer.backend.parts[0].blocks.values())).register_forward_pre_hook(never_ends)
"""


@pytest.mark.parametrize(("size", "asleep", "others"), [(2, 1, "rank 0 waits"), (4, 2, "ranks 0-1, 3 wait")])
def test_a_stage_that_hangs_is_named(ranks: Any, size: int, asleep: int, others: str) -> None:
    words = ["train.backend=PP", f"backend.pp={size}", "model.n_layer=4", "model.batch_size=4"]
    message, _ = hanging.run(ranks, size, CULPRIT, str(asleep), *words)
    assert f"{others} in a pipeline's send or receive for rank {asleep}; " in message
    line = hanging.line_of("stage", hanging.script(CULPRIT))
    where = rf"rank {asleep} \([^);]*; pp={asleep}\) is at hang\.py:{line} in never_ends \(training after 2 steps\)"
    assert re.search(where, message), message
