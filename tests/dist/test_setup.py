"""Joining and leaving: ``wordrun.dist`` on two ranks, and the errors when ranks cannot meet."""

from __future__ import annotations

import base64
import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from wordrun.data.tokenizers.subword import GPT2_URLS, _cached_name

if TYPE_CHECKING:
    from conftest import Command

SCRIPT = """
import json, random, sys
import numpy as np
import torch
import torch.distributed as td
import wordrun.dist as dist
from wordrun.dist.collectives import all_mean, all_sum

found = {}
world = dist.identify()
found["before"] = dist.broadcast({"rank": world.rank} if world.rank == 0 else None, world)
with dist.guard(world):
    world = dist.setup(world, device="cpu", seed=5)
    found["rank"], found["world"], found["group"] = world.rank, str(world), td.get_backend()
    mine = torch.tensor([1.0, 10.0]) * (world.rank + 1)
    found["sum"], found["mean"] = all_sum(mine).tolist(), all_mean(mine).tolist()
    found["unchanged"] = mine.tolist()
    found["during"] = dist.broadcast(["first"] if world.rank == 0 else None, world)
    found["again"] = dist.broadcast(["second"] if world.rank == 0 else None, world)
    found["random"] = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    assert dist.setup() == world
    dist.cleanup()
    found["nested"] = td.is_initialized()
    dist.cleanup()
    found["left"] = not td.is_initialized()
sys.stdout.write(json.dumps(found) + "\\n")
"""


@pytest.fixture(params=["torchrun", "mpiexec"])
def found(request: pytest.FixtureRequest, ranks: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """Return what each of two ranks has found."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", under=request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate" not in done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda each: each["rank"])


def test_two_ranks_meet_agree_and_leave(found: list[dict[str, Any]]) -> None:
    assert [each["rank"] for each in found] == [0, 1]
    for rank, each in enumerate(found):
        assert each["world"] == f"[cpu] [rank {rank} of 2] [local rank {rank} of 2] [node 0 of 1]"
        assert each["group"] == "gloo"
        assert each["before"] == {"rank": 0}
        assert (each["during"], each["again"]) == (["first"], ["second"])
        assert (each["sum"], each["mean"]) == ([3.0, 30.0], [1.5, 15.0])
        assert each["unchanged"] == [1.0 + rank, 10.0 + 10 * rank]
        assert (each["nested"], each["left"]) == (True, True)
    assert found[0]["random"] == found[1]["random"]


SETUP = "import wordrun.dist as dist\nwith dist.session(timeout_s=5) as world: print(world)"
RANK_0 = {"WORDRUN_LAUNCHER": "local", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


LEAVES = """
import sys
import torch
from wordrun import dist

with dist.session(device="cpu") as world:
    if world.rank == 1:
        sys.exit("no more data") if sys.argv[1] == "text" else sys.exit(5)
    torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(("how", "status"), [("number", 5), ("text", 1)])
@pytest.mark.parametrize("under", ["fork", "mpiexec"])
def test_a_rank_that_exits_ends_the_others(how: str, status: int, under: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVES)
    done = ranks(2, "script.py", how, under=under)
    assert done.returncode == status
    assert ("[rank 1] no more data\n" in done.stderr) == (how == "text")
    assert "Traceback" not in done.stderr


def test_ranks_without_an_address_are_refused(command: Command) -> None:
    done = command(sys.executable, "-c", SETUP, **RANK_0)
    assert done.returncode == 2
    says = ("2 ranks", "MASTER_ADDR", "MASTER_PORT", "start them with `launch`")
    assert [text for text in says if text not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = command(sys.executable, "-c", SETUP, **RANK_0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "Leave MASTER_PORT unset" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_never_comes_is_not_waited_for_beyond_the_limit(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = command(sys.executable, "-c", SETUP, **RANK_0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 2
    assert "rank 0 of 2" in done.stderr
    assert "1/2 clients joined" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_mpi_library_is_one_message(command: Command) -> None:
    """Ending the job must not ask for MPI again."""
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    done = command(sys.executable, "-c", f"import sys\nsys.modules['mpi4py'] = None\n{SETUP}", **hydra)
    assert done.returncode == 2
    assert "mpi4py cannot load MPI" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_process_ignores_what_an_earlier_job_left(command: Command) -> None:
    """A stale MASTER_ADDR makes torch wait for minutes, but a single process needs no address."""
    done = command(sys.executable, "-c", SETUP, MASTER_ADDR="10.255.255.1", MASTER_PORT="29500")
    assert done.stdout == "[cpu] [rank 0 of 1] [local rank 0 of 1] [node 0 of 1]\n", done.stderr
    assert done.returncode == 0


VOCABULARY = """
import os
from wordrun import dist
from wordrun.config import TextConfig, GPT2TokenizerConfig
from wordrun.data.foreign import open_foreign

with dist.session(device="cpu") as world:
    os.environ["TIKTOKEN_CACHE_DIR"] = f"cache-{world.rank}"
    tokenizer, *_ = open_foreign(TextConfig("theirs", "shards", path="shards"), GPT2TokenizerConfig(), world)
    assert tokenizer.encode("a").tolist() == [97]
"""


def test_one_node_with_the_vocabulary_is_enough(ranks: Any, tmp_path: Path) -> None:
    """Its shards are on a shared file system, tiktoken's cache is on each node's own."""
    for folder in ("shards", "cache-0"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "shards" / "train.npy", np.arange(100, dtype=np.uint16))
    words = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "cache-0" / _cached_name(next(iter(GPT2_URLS)))).write_text(words)
    (tmp_path / "script.py").write_text(VOCABULARY)
    done = ranks(2, "script.py", under="fork")
    assert done.returncode == 0, done.stdout + done.stderr
