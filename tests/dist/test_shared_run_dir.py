"""A run directory that a host does not see is rejected before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from wordrun.launch.address import free_port

if TYPE_CHECKING:
    from pathlib import Path

WORDS = (
    "data=sample",
    "model=nano",
    "tracker=jsonl",
    "train.device=cpu",
    "train.max_iters=2",
    "train.eval_iters=1",
    "model.n_layer=1",
)
# The second "host" has a file system of its own over the working directory's outputs.
OWN_OUTPUTS = 'mount -t tmpfs none "$PWD/outputs" && exec "$@"'


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_directory_is_seen_by_each_host(shared: bool, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    own = ["unshare", "-m", "sh", "-c", OWN_OUTPUTS, "sh"]
    if not shared and subprocess.run([*own, "true"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("only root may mount")
    common = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORDRUN_HOSTS": "one,two",
        "WORDRUN_LAUNCHER": "local",
    }
    command = [sys.executable, "-m", "wordrun", *WORDS, "hydra.run.dir=outputs/run", "train.backend=DDP"]
    ranks = [
        subprocess.Popen(
            command if shared or rank == 0 else [*own, *command],
            cwd=tmp_path,
            env={**os.environ, **common, "RANK": str(rank), "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = "".join("".join(rank.communicate(timeout=120)) for rank in ranks)
    assert [rank.returncode for rank in ranks] == ([0, 0] if shared else [2, 2]), said
    left = {path.name for path in (tmp_path / "outputs/run").iterdir()}
    assert not any(name.startswith(".shared") for name in left)
    if not shared:
        assert f"the run directory {tmp_path}/outputs/run, which rank 0 has created on one, is not seen by two" in said
        assert "hydra.run.dir=DIR" in said
        assert "run.json" not in left
