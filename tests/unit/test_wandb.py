"""W&B: online or offline by itself, and what is in the record, as W&B's own program reads it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

import wordrun
from wordrun.common.errors import UserError
from wordrun.track.metrics_jsonl import read_lines as read
from wordrun.track.options import WandbConfig
from wordrun.track.wandb import choose_mode
from wordrun.train.hooks.base import Hook, Training

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


def test_the_host_of_wandb_login_counts(listening: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ``wandb login --host`` and ``wandb offline`` of 0.31 write: a port in netrc, and a host in the settings."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".netrc").write_text(f"machine {listening[7:]}\n  login user\n  password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert choose_mode(WandbConfig()) == "offline", "the key is for another host than W&B's own"
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\nbase_url = {listening}\n\n")
    assert choose_mode(WandbConfig()) == choose_mode(WandbConfig(mode="online")) == "online"
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n\n")
    assert choose_mode(WandbConfig()) == "offline"
    (tmp_path / "wandb" / "settings").write_text("no settings")
    settings.write_text("[default]\nbase_url = http://elsewhere\n\n")
    assert choose_mode(WandbConfig()) == "offline"


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
    """Return everything that W&B wrote."""
    (file,) = offline.glob("wandb/offline-run-*/run-*.wandb")  # one run, and only one
    return records_in(file)


def records_in(file: Path) -> list[Any]:
    """Return the records in a .wandb file, read by W&B's own program."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_type(kind: str, records: list[Any]) -> list[Any]:
    """Return the contents of the records of a type: run, history or exit."""
    return [record[kind] for record in records if record["type"] == kind]


def test_metrics_have_the_same_names_and_values_as_the_file(offline: Path, records: list[Any]) -> None:
    seen: dict[int, dict[str, Any]] = {}
    for entry in of_type("history", records):
        seen.setdefault(entry["item"]["_step"], {}).update(entry["item"])
    expected: dict[int, dict[str, Any]] = {}
    for line in read(offline):
        expected.setdefault(line["step"], {}).update({k: v for k, v in line.items() if v is not None})
    assert sorted(seen) == sorted(expected) == [1, 2, 4]
    for step, line in expected.items():
        assert {name: seen[step][name] for name in line} == pytest.approx(line)
    assert "val_loss" in seen[4]


def test_the_config_and_the_datas_origin_are_there(records: list[Any], text_file: Path) -> None:
    (started,) = of_type("run", records)
    config = started["config"]["update"]
    assert config["model"]["n_embd"] == 16
    assert config["optimizer"]["learning_rate"] == 0.001
    assert config["data"]["origin"] == str(text_file)
    assert started["project"] == "shakes"
    assert started["tags"] == ["a", "b"]


def test_the_run_ended_well(records: list[Any]) -> None:
    (ended,) = of_type("exit", records)
    assert ended.get("exit_code", 0) == 0


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
    history = [entry["item"] for entry in of_type("history", records_in(file))]
    assert [line["_step"] for line in history] == [1, 2, 3, 4]
    assert "loss" in history[0]


def test_a_failure_to_start_is_one_line_and_the_run_continues(
    small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise FileExistsError(17, "File exists", f"{tmp_path}/run/wandb")

    monkeypatch.setattr(wandb, "init", fails)
    words = [word for word in small() if word != "tracker=jsonl"]
    settings = ["tracker=wandb", "tracker.wandb.mode=offline", f"hydra.run.dir={tmp_path}/run"]
    with wordrun.Trainer(wordrun.compose([*words, *settings])) as trainer:
        trainer.train()
    (line,) = [line for line in (tmp_path / "run/log.txt").read_text().splitlines() if "wandb failed" in line]
    assert re.search(r"tracker=wandb failed \(UserError: W&B failed to start .*File exists.*: the run continues", line)


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


def continued(folder: Path, small: Words, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Continue the run in ``folder`` offline from its step 4 to step 7, and return what W&B wrote of that."""
    before = set(folder.glob("wandb/offline-run-*"))
    monkeypatch.setenv("NETRC", str(folder / "no-netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = small("tracker=wandb", "tracker.wandb.project=shakes", "train.log_interval=1", "train.resume=auto")
    words.remove("tracker=jsonl")
    with wordrun.Trainer(wordrun.compose([*words, "train.max_iters=7", f"hydra.run.dir={folder}"])) as trainer:
        trainer.train()
    (new,) = set(folder.glob("wandb/offline-run-*")) - before
    (file,) = new.glob("run-*.wandb")
    return records_in(file)


@pytest.mark.parametrize("killed", [False, True])
def test_a_continued_run_is_the_same_run_with_each_step_once(
    offline: Path, records: list[Any], small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(offline, folder, symlinks=True)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 5, "loss": 1.0}\n')  # logged after the last checkpoint
    if killed:
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "exit_reason": "running"}))
    later = continued(folder, small, monkeypatch)
    assert of_type("run", later)[0]["run_id"] == of_type("run", records)[0]["run_id"]
    assert [entry["item"]["_step"] for entry in of_type("history", later)] == [6, 7]
    assert [line["step"] for line in read(folder) if "loss" in line] == [1, 2, 4, 5, 6, 7]
    log = (folder / "log.txt").read_text()
    assert ("offline record may lack the last seconds before the run was killed" in log) == killed
    (upload,) = re.findall("wandb sync (.*)", log.rpartition("recorded offline")[2])
    assert upload.split() == sorted(map(str, folder.glob("wandb/offline-run-*")))


def test_a_run_that_began_without_wandb_sends_its_history(
    offline: Path, small: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as with WANDB_MODE=disabled, in which its checkpoint has an ID, too."""
    folder = tmp_path / "run"
    shutil.copytree(offline, folder, symlinks=True)
    shutil.rmtree(folder / "wandb")
    later = continued(folder, small, monkeypatch)
    assert [entry["item"]["_step"] for entry in of_type("history", later)] == [1, 2, 4, 5, 6, 7]
