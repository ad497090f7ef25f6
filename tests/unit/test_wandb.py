"""W&B: online or offline by itself, and what is in the record, decoded with wandb's own messages.

wandb reads its files in Go by now, its former Python reader is gone, and ``scan`` stands in for it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

import wordrun
from wordrun.config import WandbConfig
from wordrun.errors import UserError
from wordrun.track.jsonl import read
from wordrun.track.wandb import choose_mode
from wordrun.track.wandb_files import last_step
from wordrun.train.training import Hook, Training

Words = Callable[..., list[str]]
KEY = "0" * 40


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")


@pytest.fixture
def listening() -> Iterator[str]:
    """Return the address of a socket that accepts connections, as W&B's server does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    """Return an address at which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """Return an address that neither accepts nor refuses: a queue of connections that is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for client in waiting:
            client.close()


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_users_variable_comes_first(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert choose_mode(WandbConfig()) == mode


def test_a_disabled_run_starts_nothing(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not import wandb, which takes a second."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = [word for word in small("tracker=[wandb,jsonl]") if word != "tracker=jsonl"]
    with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={tmp_path}/run"])) as trainer:
        trainer.train()
        assert [*trainer.run.trackers] == ["jsonl", "wandb"]
        assert trainer.run.trackers["wandb"].state()["id"], "which a run that resumes with W&B enabled continues"
    assert not (tmp_path / "run/wandb").exists()
    assert "W&B" not in "".join(capsys.readouterr())


def test_the_users_option_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    assert choose_mode(WandbConfig(mode="offline")) == "offline"


def test_without_a_key_it_is_offline(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", listening)
    assert choose_mode(WandbConfig()) == "offline"


def test_online_without_a_key_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError) as caught:
        choose_mode(WandbConfig(mode="online"))
    says = ("tracker.wandb.mode=online", "wandb login", "WANDB_API_KEY", "tracker.wandb.mode=offline")
    assert [text for text in says if text not in str(caught.value)] == []


def test_with_a_key_and_a_server_it_is_online(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", listening)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert choose_mode(WandbConfig()) == "online"


def test_a_key_from_wandb_login_counts(listening: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", listening)
    assert choose_mode(WandbConfig()) == "online"


def test_a_server_that_refuses_means_offline(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", nobody)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert choose_mode(WandbConfig()) == "offline"


def test_a_server_that_does_not_answer_means_offline_in_time(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", silent)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    begin = time.monotonic()
    assert choose_mode(WandbConfig(probe_s=0.4)) == "offline"
    assert 0.3 < time.monotonic() - begin < 5


def test_behind_a_proxy_the_proxy_is_asked(listening: str, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("https_proxy", listening)
    assert choose_mode(WandbConfig()) == "online"
    monkeypatch.setenv("https_proxy", nobody)
    assert choose_mode(WandbConfig()) == "offline"


# What is in the record


@pytest.fixture(scope="module")
def offline(small: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that W&B recorded offline."""
    folder = tmp_path_factory.mktemp("wandb") / "run"
    words = small("tracker=wandb", "tracker.wandb.project=shakes", "tracker.wandb.tags=[a,b]", "train.log_interval=2")
    words.remove("tracker=jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("NETRC", str(folder.parent / "no-netrc"))
        patch.setenv("WANDB_CACHE_DIR", str(folder.parent / "cache"))
        patch.setenv("WANDB_CONFIG_DIR", str(folder.parent / "config"))
        with wordrun.Trainer(wordrun.compose([*words, f"hydra.run.dir={folder}"])) as trainer:
            trainer.train()
    return folder


@pytest.fixture(scope="module")
def records(offline: Path) -> list[Any]:
    """Return everything that W&B wrote, decoded by W&B."""
    (file,) = offline.glob("wandb/offline-run-*/run-*.wandb")  # one run, and only one
    return [wandb_internal_pb2.Record.FromString(data) for data in scan(file.read_bytes())]


def scan(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format, after a header of seven bytes."""
    assert content[:4] == b":W&B"
    block, header, whole, last = 32768, 7, 1, 4
    at, parts = header, b""
    while at + header <= len(content):
        if block - at % block < header:  # too little for a header: the rest of the block is empty
            at += block - at % block
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + header : at + header + length]
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        at, parts = at + header + length, parts + part
        if kind in (whole, last):
            yield parts
            parts = b""


def write(file: IO[bytes], data: bytes) -> None:
    """Append a record to a .wandb file; the checksums are left out."""
    kinds = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
    first = True
    while data or first:
        if (left := 32768 - file.tell() % 32768) < 7:
            file.write(bytes(left))
            continue
        part, data = data[: left - 7], data[left - 7 :]
        file.write(struct.pack("<IHB", 0, len(part), kinds[first, not data]) + part)
        first = False


def test_metrics_have_the_same_names_and_values_as_the_file(offline: Path, records: list[Any]) -> None:
    seen: dict[int, dict[str, Any]] = {}
    for entry in records:
        if entry.WhichOneof("record_type") == "history":
            line = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in entry.history.item}
            seen.setdefault(line["_step"], {}).update(line)
    expected: dict[int, dict[str, Any]] = {}
    for line in read(offline):
        expected.setdefault(line["step"], {}).update({k: v for k, v in line.items() if v is not None})
    assert sorted(seen) == sorted(expected) == [1, 2, 4]
    for step, line in expected.items():
        assert {name: seen[step][name] for name in line} == pytest.approx(line)
    assert "val_loss" in seen[4]


def test_the_config_and_the_datas_origin_are_there(records: list[Any], text_file: Path) -> None:
    (started,) = [entry.run for entry in records if entry.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["model"]["n_embd"] == 16
    assert config["optimizer"]["learning_rate"] == 0.001
    assert config["data"]["origin"] == str(text_file)
    assert started.project == "shakes"
    assert list(started.tags) == ["a", "b"]


def test_the_run_ended_well(records: list[Any]) -> None:
    (ended,) = [entry.exit for entry in records if entry.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 0


def test_the_end_of_the_run_says_how_to_upload(offline: Path) -> None:
    (folder,) = offline.glob("wandb/offline-run-*")
    assert f"wandb sync {folder}" in (offline / "log.txt").read_text()


def test_steps_do_not_wait_for_wandb_and_it_gets_them_all(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_step, init = threading.Event(), wandb.init

    class Second(Hook):
        def after_step(self, trainer: Training) -> None:
            if trainer.step == 2:
                second_step.set()

    def late(**settings: Any) -> Any:
        assert second_step.wait(100)
        return init(**settings)

    monkeypatch.setattr(wandb, "init", late)
    words = [word for word in small("train.log_interval=1") if word != "tracker=jsonl"]
    settings = ["tracker=wandb", "tracker.wandb.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    with wordrun.Trainer(wordrun.compose([*words, *settings]), hooks=[Second()]) as trainer:
        trainer.train()
    (file,) = tmp_path.glob("run/wandb/offline-run-*/run-*.wandb")
    entries = [wandb_internal_pb2.Record.FromString(data) for data in scan(file.read_bytes())]
    history = [entry.history for entry in entries if entry.WhichOneof("record_type") == "history"]
    told = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in history[0].item}
    assert (told["_step"], "loss" in told) == (1, True)
    assert len(history) == 4


def test_a_failure_to_start_is_one_line_and_the_run_continues(small: Words, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/wandb").write_text("in the way")
    words = [word for word in small() if word != "tracker=jsonl"]
    settings = ["tracker=wandb", "tracker.wandb.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    with wordrun.Trainer(wordrun.compose([*words, *settings])) as trainer:
        trainer.train()
    (line,) = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "wandb failed" in line]
    assert re.search(r"tracker=wandb failed \(FileExistsError: .*/wandb'.*\): the run continues without it", line)


def test_a_missing_library_is_named(small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = [word for word in small() if word != "tracker=jsonl"]
    with (
        wordrun.Trainer(wordrun.compose([*words, "tracker=wandb", f"hydra.run.dir={tmp_path}/run"])) as trainer,
        pytest.raises(UserError, match="tracker=wandb: No module named 'wandb'; pip install wandb, or use tracker=jso"),
    ):
        trainer.train()


def test_a_run_without_wandb_has_nothing_of_it(small: Words, tmp_path: Path) -> None:
    with wordrun.Trainer(wordrun.compose(small(f"hydra.run.dir={tmp_path}/run"))) as trainer:
        trainer.train()
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_continued_run_is_the_same_run_with_each_step_once(
    offline: Path, records: list[Any], small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if W&B's process was killed with its rank before it had written the last lines of metrics."""
    folder = tmp_path / "run"
    shutil.copytree(offline, folder, symlinks=True)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "loss": 1.0}\n')  # logged after the last checkpoint
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    whole = file.read_bytes()
    second = [data for data in scan(whole) if wandb_internal_pb2.Record.FromString(data).HasField("history")][1]
    file.write_bytes(whole[: whole.index(second[:20]) + 20])
    assert last_step(folder / "wandb", file.stem[4:]) == 1
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = small("tracker=wandb", "tracker.wandb.project=shakes", "train.log_interval=1", "train.resume=auto")
    words.remove("tracker=jsonl")
    with wordrun.Trainer(wordrun.compose([*words, "train.max_iters=7", f"hydra.run.dir={folder}"])) as trainer:
        trainer.train()
    before = {path.name for path in offline.glob("wandb/offline-run-*")}
    (new,) = [path for path in folder.glob("wandb/offline-run-*") if path.name not in before]
    (file,) = new.glob("run-*.wandb")
    later = [wandb_internal_pb2.Record.FromString(data) for data in scan(file.read_bytes())]
    ids = [
        next(each.run.run_id for each in part if each.WhichOneof("record_type") == "run") for part in (records, later)
    ]
    assert ids[0] == ids[1]
    told = [each.history for each in later if each.WhichOneof("record_type") == "history"]
    steps = [json.loads(i.value_json) for h in told for i in h.item if (i.key or ".".join(i.nested_key)) == "_step"]
    assert steps == [2, 4, 5, 6, 7]
    assert [line["step"] for line in read(folder) if "loss" in line] == [1, 2, 4, 5, 6, 7]
    (upload,) = re.findall("wandb sync (.*)", (folder / "log.txt").read_text().rpartition("recorded offline")[2])
    assert [Path(part).name for part in upload.split()] == sorted([*before, new.name])


def test_the_last_step_of_a_long_record_is_found_at_its_end(tmp_path: Path) -> None:
    """Records that span blocks, and the rest of a record whose beginning is not read."""
    (tmp_path / "offline-run-1-me").mkdir()
    with (tmp_path / "offline-run-1-me/run-me.wandb").open("wb") as file:
        file.write(b":W&B" + bytes(3))
        for step in range(300):
            record = wandb_internal_pb2.Record()
            for key, value in (("_step", step), ("text", "x" * 9000)):
                record.history.item.add(key=key, value_json=json.dumps(value))
            write(file, record.SerializeToString())
        assert file.tell() > 2 * 32 * 32768
        write(file, wandb_internal_pb2.Record(exit={"exit_code": 0}).SerializeToString())
    assert last_step(tmp_path, "me") == 299
    assert last_step(tmp_path, "another") == -1
