"""float8 linear layers on a GPU that has them, and the refusal on one that does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from gpu_runs import Train

if TYPE_CHECKING:
    import torch


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compile_", ["false", "true"])
def test_losses_are_near_those_in_bf16(train: Train, device: torch.device, recipe: str, compile_: str) -> None:
    pytest.importorskip("torchao.float8", exc_type=ImportError, reason="pip install 'wordrun[float8]'")
    from wordrun.backend import float8
    from wordrun.common.errors import ConfigError

    words = ["train.dtype=bf16", f"train.compile={compile_}", "model.n_embd=256"]
    refusal = ""
    try:
        float8.require(recipe, device)
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        with pytest.raises(ConfigError, match=re.escape(refusal)):
            train("float8", *words, f"train.float8={recipe}")
        return
    exact, ours = train("bf16", *words), train("float8", *words, f"train.float8={recipe}")
    assert ours.losses != exact.losses
    assert ours.losses == pytest.approx(exact.losses, rel=0.03)
