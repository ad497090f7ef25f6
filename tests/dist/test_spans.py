"""profiler=spans: one timeline of all ranks, on one clock."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

SMALL = shlex.split("""
    model=nano
    data=sample tokenizer=byte tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=8
    train.log_interval=2 train.eval_interval=0 train.sample_tokens=0 train.checkpoint_interval=0
    train.compile=false model.batch_size=1 model.n_layer=2 model.n_head=2 model.n_embd=16
    model.block_size=8 profiler=spans profiler.wait=3 profiler.active=4 hydra.run.dir=run
""")


def test_the_phases_of_all_ranks_are_in_one_timeline(ranks: Any, tmp_path: Path) -> None:
    done = ranks(2, "-m", "wordrun", *SMALL, under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(gzip.decompress((tmp_path / "run/profile/spans.json.gz").read_bytes()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == {0, 1}
    for rank in (0, 1):
        mine = [event for event in spans if event["tid"] == rank]
        # Although lines of metrics, which empty the clock, are logged in between.
        for phase in ("data", "forward", "backward", "optimizer"):
            assert sum(event["name"] == phase for event in mine) == 4, phase
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in mine)
        times = [event["ts"] for event in mine if event["name"] == "forward"]
        assert times == sorted(times)
    # Ranks end a step together, so that their optimizers begin at about the same time on a common clock.
    begins = [
        [event["ts"] for event in spans if (event["tid"], event["name"]) == (rank, "optimizer")] for rank in (0, 1)
    ]
    assert max(abs(a - b) for a, b in zip(*begins, strict=True)) < 0.5e6
    log = (tmp_path / "run/log.txt").read_text()
    assert log.index("step 8/8") < log.index("timeline of 2 ranks: ") < log.index("open it at https://ui.perfetto.dev")
