"""A scaling study on real ranks."""

from __future__ import annotations

import csv
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command, Start

pytestmark = pytest.mark.forked_programs

SMALL = tuple(
    shlex.split("""
    model=nano
    data=sample model.n_layer=4 model.n_embd=16 model.n_head=4 model.block_size=16
    model.batch_size=4 train.device=cpu
""")
)
STUDY = (sys.executable, "-m", "wordrun", "study", "scaling")


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "points.csv").open(newline="") as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def test_1_and_2_ranks(command: Command, tmp_path: Path) -> None:
    """Each point has a row, an impossible one its reason, and the second call runs nothing."""
    words = (*STUDY, *shlex.split("--ranks 1,2 --steps 2 --repeats 2 --backends DDP,TP:tp=3 --out study"), *SMALL)
    done = command(*words, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "study")
    states = {name: (row["state"], row["ranks"]) for name, row in found.items()}
    assert {name: states[name] for name in states if "DDP" in name} == {f"DDP-{n}": ("done", f"{n}") for n in (1, 2)}
    assert "tp=3" in found["TP-tp-3-2"]["reason"]
    for row in (found[f"DDP-{n}"] for n in (1, 2)):
        assert float(row["tps_min"]) <= float(row["tps"]) <= float(row["tps_max"])
        assert row["global_batch"] == "8"
        assert "torch" in row["versions"]
        assert float(row["memory_gib"]) > 0
    page = (tmp_path / "study" / "report.md").read_text()
    assert "Strong scaling on 1, 2 ranks" in page
    assert "TP-tp-3-2 | impossible" in page
    assert (tmp_path / "study" / "scaling.png").stat().st_size > 1000
    again = command(*words)
    assert "study study: 0 points, 0 at a time; not run: 2 finished, 2 impossible" in again.stdout
    assert rows(tmp_path / "study") == found


def test_a_study_that_is_stopped_goes_on_with_the_next_point(command: Command, start: Start, tmp_path: Path) -> None:
    """As at the end of an allocation, while the first point still runs; the second call runs both."""
    words = (
        *STUDY,
        *shlex.split("--ranks 1 --steps {} --repeats 1 --backends DDP,DDP:bucket_cap_mb=1 --out study"),
        *SMALL,
    )
    study = start(*(word.format(100_000) for word in words))
    log = tmp_path / "study" / "runs" / "DDP-1.log"
    end = time.monotonic() + 200
    while not (log.exists() and "step 1/" in log.read_text()):
        assert study.poll() is None, study.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)
    study.send_signal(signal.SIGTERM)
    out, _ = study.communicate(timeout=120)
    assert study.returncode == 75, out
    assert "start the study again to continue" in out
    assert not (tmp_path / "study" / "points.csv").exists()
    done = command(*(word.format(2) for word in words), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["state"] for row in rows(tmp_path / "study").values()} == {"done"}


def test_a_failed_run_has_its_reason_and_is_repeated_on_request(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    words = (
        *STUDY,
        *shlex.split("--ranks 1 --steps 2 --repeats 1 --out study"),
        *SMALL,
        "data=text",
        "tokenizer=char",
        f"data.path={text}",
    )
    assert command(*words, timeout=200).returncode == 1
    (row,) = rows(tmp_path / "study").values()
    assert row["state"] == "failed"
    assert f"{text}" in row["reason"]
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    assert "study study: 0 points, 0 at a time; not run: 1 failed" in command(*words).stdout
    assert command(*words, "--retry-failed", timeout=200).returncode == 0
    (row,) = rows(tmp_path / "study").values()
    assert row["state"] == "done"
