"""The faults of a run in run.json."""

from __future__ import annotations

import json

import pytest

from wordrun.train.recoveries import Recoveries


def test_each_fault_is_noted_once_and_completed_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """launch names all faults so far, for a rank may be killed before it has noted one."""
    first, second, third = ({"rank": rank, "pid": 100, "cause": "SIGKILL", "time": 10.0 * rank} for rank in range(3))
    monkeypatch.setenv("WORDRUN_FAULTS", json.dumps([first, second, third]))
    before = {**first, "resumed_step": 2, "source": "disk", "seconds": 3.0}
    found = Recoveries([before], 8, "memory")
    assert found.all[0] == before
    assert [(each["rank"], each["resumed_step"], each["source"], each["seconds"]) for each in found.all[1:]] == [
        (1, 8, "memory", None),
        (2, 8, "memory", None),
    ]
    assert found.complete()
    assert all(each["seconds"] > 0 for each in found.all)
    assert not found.complete()


def test_a_run_without_faults_has_none() -> None:
    assert Recoveries([], 0, None).all == []
    assert not Recoveries([], 0, None).complete()
