"""What ranks send each other arrives as it was, and nothing else can be sent."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

import wordrun
from wordrun.checkpoint.folder import Folder
from wordrun.config.registry import parts
from wordrun.data.prepare.sources.base import WorkItem
from wordrun.dist import coordination


def test_configs_arrive_as_they_were() -> None:
    for name, part in parts("backend").items():
        cfg = wordrun.compose(
            ["data=sample", f"train.backend={part.options.name}", "tracker=wandb", "hooks=[early_stop]"]
        )
        assert coordination.loads(coordination.dumps(cfg)) == cfg, name


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        10**30,
        0.1,
        -math.inf,
        "é\n",
        [1, [2]],
        (1, ("a", None)),
        {"a": 1, "tuple": (2,)},
        {3: {"b": []}},
        Path("/a b"),
        (Path("run"), [Folder(Path("run/step-00000003"), 3)]),
        WorkItem(1, "text", "a.txt", stop=7),
    ],
    ids=repr,
)
def test_values_arrive_as_they_were(value: Any) -> None:
    found = coordination.loads(coordination.dumps(value))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), [Path], 1j])
def test_what_is_no_plain_value_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        coordination.dumps(value)


@pytest.mark.parametrize(
    "found",
    [
        {"os:system": [["command", "touch ran"]]},
        {"subprocess:Popen": [["args", ["touch", "ran"]]]},
        {"wordrun.common.errors:UserError": []},
        {"wordrun.dist.coordination:importlib.import_module": [["name", "antigravity"]]},
        {"antigravity:geohash": []},
        {"": []},
        {"a:b": 1, "c:d": 2},
    ],
)
def test_what_a_stranger_sends_runs_nothing(found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):  # noqa: PT011
        coordination.loads(json.dumps(found).encode())
    with pytest.raises(ValueError):  # noqa: PT011
        coordination.loads(pickle.dumps(found))
    assert not list(tmp_path.iterdir())
