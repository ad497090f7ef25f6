"""The parts of checkpoints in memory: files of shards, a node's folder, files fetched from other ranks, refusals."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

import wordrun
from wordrun.checkpoint import checksums, shards
from wordrun.checkpoint.folder import file_of, write_manifest
from wordrun.checkpoint.index import StoredTensor
from wordrun.checkpoint.memory import copies, file as memory_file
from wordrun.checkpoint.memory.node import NodeMemory, name_of
from wordrun.checkpoint.memory.peers import PeerError, Peers
from wordrun.checkpoint.sharding import Sharding
from wordrun.common.errors import ConfigError, UserError
from wordrun.config.rules import check
from wordrun.dist.world import World
from wordrun.train.trainer import Trainer

if TYPE_CHECKING:
    from conftest import Words

NAME = name_of(20, "ab12", 0)


def own(tensors: dict[str, torch.Tensor]) -> tuple[list[shards.TensorShard], dict[str, StoredTensor]]:
    """Return the complete ``tensors`` as what one rank writes."""
    stored = {
        name: StoredTensor(tensor.shape, tensor.dtype, Sharding(tuple(tensor.shape)), 0)
        for name, tensor in tensors.items()
    }
    return [shards.shard_of(name, tensor) for name, tensor in tensors.items()], stored


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that opens the memory of a run; the node's is a folder of this test."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path / "shm"))
    opened = []

    def begin(run: str = "run") -> NodeMemory:
        opened.append(NodeMemory(tmp_path / run))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def test_a_held_file_is_what_shards_write_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "long": torch.arange(7),
        "count": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "small": torch.randn(3).to(torch.float8_e4m3fn),
    }
    mine, stored = own(tensors)
    complete = memory_file.write(tmp_path, mine, 0, stored)
    path = tmp_path / file_of(0)
    assert checksums.problem(path) == f"{path.name}: its header does not match its checksum", "it is not complete yet"
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()  # training continues
    complete()
    assert checksums.problem(path) == ""
    shards.write_index(tmp_path)
    with safe_open(path, framework="pt") as file:
        for name, tensor in expected.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name).float(), tensor.float()), name
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items() if tensor.dtype != torch.float8_e4m3fn}
    shards.read(tmp_path, found)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_full_file_system_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    mine, _ = own({"a": torch.ones(2**18)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            memory_file.write(tmp_path, mine, 0, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_has_only_empty_shards_writes_a_file(tmp_path: Path) -> None:
    mine, stored = own({"none": torch.empty(0, 4)})
    memory_file.write(tmp_path, mine, 0, stored)()
    assert checksums.problem(tmp_path / file_of(0)) == ""


def checkpoint(memory: NodeMemory, name: str = NAME) -> None:
    """Publish a checkpoint of one rank."""
    draft = memory.draft(name)
    mine, stored = own({"a": torch.ones(3)})
    memory_file.write(draft, mine, 0, stored)()
    write_manifest(
        draft, {"step": 20, "files": {}, "config": {}, "backend": {"kind": "shards"}, "shards": 1, "run": "today"}
    )
    memory.publish(name)


def test_a_node_offers_only_what_is_published_and_intact(memory: Any) -> None:
    mine = memory()
    shard, stored = own({"a": torch.ones(3)})
    memory_file.write(mine.draft(name_of(30, "ab12", 1)), shard, 0, stored)
    assert mine.offers() == {}
    checkpoint(mine)
    assert mine.offers() == {NAME: {"step": 20, "shards": 1, "run": "today", "ranks": [0]}}
    assert mine.verify(NAME, 0, 1) == []
    file = mine.path / NAME / file_of(0)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert mine.verify(NAME, 0, 1) == [0]
    assert mine.offers()[NAME]["ranks"] == []
    (mine.path / NAME / "manifest.json").write_text("{}")
    assert mine.offers() == {}


def test_what_ended_runs_have_left_is_removed_when_it_is_old_or_in_the_way(memory: Any, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from wordrun.checkpoint.memory.node import NodeMemory as M\n"
    code += "m = M(Path(sys.argv[1])); m.draft('x'); print('ready', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path / "living")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == b"ready\n"
        mine, dead = memory(), NodeMemory(tmp_path / "dead")
        checkpoint(mine)
        checkpoint(dead)
        mine.draft(name_of(30, "ab12", 1))
        dead.close()
        names = {path.name.rpartition("-")[0] for path in mine.home.iterdir()}
        assert names == {"living", "dead", "run"}
        mine.clean(0)
        assert dead.path.exists(), "it may be launched again"
        assert [path.name for path in mine.path.iterdir()] == [NAME]
        old = time.time() - 7200
        for path in (dead.path, *dead.path.iterdir()):
            os.utime(path, (old, old))
        mine.clean(0)
        assert not dead.path.exists()
        again = memory("again")
        again.clean(2**62)  # more than there is
        assert {path.name.rpartition("-")[0] for path in mine.home.iterdir()} == {"living", "run", "again"}
        living.kill()


def test_the_memory_of_another_user_or_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"cannot write to .*none.*: No such file or directory"):
        NodeMemory(tmp_path / "run")
    (tmp_path / "none").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        NodeMemory(tmp_path / "run")


def test_ranks_fetch_files_of_each_other_and_nobody_else_does(tmp_path: Path) -> None:
    (tmp_path / "served" / NAME).mkdir(parents=True)
    content = os.urandom(5_000_003)
    (tmp_path / "served" / NAME / "file").write_bytes(content)
    (tmp_path / "served" / "secret").write_text("no")
    peers, stranger = (Peers(tmp_path / "served", World(), secret) for secret in ("ab12", "cd34"))
    others = [socket.create_connection(peers.address) for _ in range(300)]
    for other, said in zip(
        others, (b"\xff\n", b"\0" * 2000, b"[" * 60_000, b"ab12 a/b\nab12 a/b\n", "é é/é\n".encode()), strict=False
    ):
        with contextlib.suppress(OSError):
            other.sendall(said)
    try:
        peers.fetch(peers.address, f"{NAME}/file", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content
        with pytest.raises(PeerError, match="does not have"):
            peers.fetch(peers.address, f"{NAME}/other", tmp_path / "none")
        for name, who in ((f"{NAME}/../secret", peers), ("../served/secret", peers), (f"{NAME}/file", stranger)):
            with pytest.raises(OSError, match=r"closed|reset"):
                who.fetch(peers.address, name, tmp_path / "none")
    finally:
        peers.close()
        stranger.close()
        for other in others:
            other.close()
    with pytest.raises(OSError, match=r"refused|reset|closed"):
        stranger.fetch(peers.address, f"{NAME}/file", tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == ["copy", "served"]


def trained(words: list[str]) -> None:
    with Trainer(wordrun.compose(words)) as trainer:
        trainer.train()


def free(monkeypatch: pytest.MonkeyPatch, *found: int) -> None:
    """Let the file system have so many bytes free each time that it is asked, and enough after that."""
    left = iter(found)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(left, 2**40)))


EVERY = "train.memory_checkpoint_interval=2"


def test_memory_that_cannot_be_used_is_refused_with_the_figures(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small(EVERY, f"hydra.run.dir={tmp_path}/run")
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path / "none"))
    with pytest.raises(
        ConfigError, match=r"train\.memory_checkpoint_interval=2: .* cannot write to .*none.*set it to 0"
    ):
        trained(words)
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path))
    free(monkeypatch, 100)
    figures = r"need \d+\.\d MiB in .*, twice while the next one is written\), but only 0\.0 MiB are free; set it to 0"
    with pytest.raises(ConfigError, match=figures):
        trained(words)


def test_a_save_that_finds_no_room_is_left_out_and_the_next_one_is_tried(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path))
    free(monkeypatch, 2**40, 0)  # at the start, and at the first save
    kept = []
    monkeypatch.setattr(NodeMemory, "keep_only", lambda self, name="": kept.append(name))
    trained(small(EVERY, "train.max_iters=6", f"hydra.run.dir={tmp_path}/run"))
    assert "the checkpoint of step 2 could not be kept in memory" in capsys.readouterr().out
    assert [name.split("-")[1] for name in kept] == ["00000004"]
    assert not list(tmp_path.glob("wordrun-memory-*/*"))


def test_a_run_that_goes_on_without_room_warns_once_until_there_is_some(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path))
    words = small(EVERY, f"hydra.run.dir={tmp_path}/run", "train.resume=auto")
    trained([*words, "train.max_iters=2"])
    free(monkeypatch, 0, 0, 0, 0)  # at both starts, and at the first two saves
    stops = [*words, "train.max_iters=10", "train.on_save_error=stop"]
    with pytest.raises(ConfigError, match=r"but only 0\.0 MiB are free"):
        trained(stops)
    capsys.readouterr()
    trained([*words, "train.max_iters=10"])
    said = capsys.readouterr().out
    assert (
        said.count("0.0 MiB are free; training continues without checkpoints in memory, and retries every 2 steps") == 1
    )
    assert said.count("are free") == 1
    assert "checkpoints are kept in memory again, from step 8 on" in said


def test_what_ended_runs_have_left_makes_room_for_a_share(memory: Any, tmp_path: Path) -> None:
    dead = NodeMemory(tmp_path / "dead")
    checkpoint(dead)
    dead.close()
    made = copies.MemoryCheckpoints.__new__(copies.MemoryCheckpoints)
    made.memory = memory()
    checkpoint(made.memory)
    whole = (made.memory.path / NAME / file_of(0)).read_bytes()

    class Full(Peers):
        def __init__(self) -> None:
            self.folder = dead.path

        def fetch(self, address: Any, name: str, into: Path) -> None:
            if dead.path.exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            into.write_bytes(whole)

    made.peers = Full()
    assert made.fetch(("localhost", 1), NAME, 0).read_bytes() == whole


def test_without_the_option_nothing_of_it_is_created(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies.MemoryCheckpoints, "__init__", None)
    monkeypatch.setenv("WORDRUN_SHM", str(tmp_path))
    trained(small(f"hydra.run.dir={tmp_path}/run"))
    assert not list(tmp_path.glob("wordrun-memory-*"))


def test_deepspeed_is_refused_with_the_reason(small: Words) -> None:
    with pytest.raises(ConfigError, match=r"memory_checkpoint_interval needs wordrun's own checkpoints"):
        check(wordrun.compose(small("train.backend=deepspeed", EVERY)), ranks=1)
