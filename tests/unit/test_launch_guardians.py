"""What ``launch --elastic`` plans, refuses and decides; with real ranks, see tests/mpi/test_launch_elastic.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wordrun.common import listener
from wordrun.common.errors import ConfigError
from wordrun.common.listener import UnfitError
from wordrun.launch.elastic import control, guardian, nodes
from wordrun.launch.elastic.connections import VARIABLE, Link, message_in
from wordrun.launch.elastic.control import Answers, GuardianControl
from wordrun.launch.elastic.starter import nodes_of, python_command
from wordrun.launch.job_script import inner
from wordrun.launch.output import Output
from wordrun.launch.parser import parse
from wordrun.launch.plan import LaunchPlan, make_plan
from wordrun.launch.retries import Retries
from wordrun.launch.schedulers import SCHEDULERS

if TYPE_CHECKING:
    from conftest import Command


def plan(*words: str) -> LaunchPlan:
    return make_plan(parse(["--elastic", *words]))


@pytest.mark.parametrize(
    ("command", "words", "forked"),
    [
        (["python", "train.py", "-x"], ["train.py", "-x"], True),
        (["python", "-u", "train.py"], ["train.py"], True),
        (["python", "-m", "wordrun", "a=b"], ["-m", "wordrun", "a=b"], True),
        ([sys.executable, "-m", "wordrun"], ["-m", "wordrun"], True),
        (["python", "-c", "pass"], None, False),
        (["python", "-X", "dev", "train.py"], None, False),
        (["python"], None, False),
        (["/bin/sh", "-c", "python train.py"], None, False),
    ],
)
def test_which_commands_are_forked(command: list[str], words: list[str] | None, forked: bool) -> None:
    assert python_command(plan("-n", "2", *command)) == (words or command, forked)


def test_a_console_script_is_forked() -> None:
    words, forked = python_command(plan("-n", "2", "wordrun", "data=sample"))
    assert (Path(words[0]).name, words[1:], forked) == ("wordrun", ["data=sample"], True)


def test_under_hang_an_interpreter_starts() -> None:
    assert python_command(plan("-n", "2", "--hang", "60", "python", "train.py")) == (["python", "train.py"], False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu-bind", "core"], "--cpu-bind core: with --elastic, guardians bind the ranks; leave it out"),
        (["--launcher", "torchrun"], "--launcher torchrun: with --elastic, guardians start the ranks; leave it out"),
    ],
)
def test_what_does_not_go_with_elastic_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*words, "-n", "2", "python", "train.py")
    assert str(refused.value) == message


def test_a_sweep_is_refused() -> None:
    with pytest.raises(ConfigError, match="a sweep launches its points itself"):
        plan("-n", "2", "python", "-m", "wordrun", "sweep", "outputs/sweep")


def test_the_launcher_starts_a_guardian_on_each_node() -> None:
    Path("hosts").write_text(f"{os.uname().nodename}\nlocalhost\n")
    made = plan("--launcher", "hydra", "--hostfile", "hosts", "-n", "4", "python", "train.py")
    assert made.argv[1:3] == ("-n", "2")
    assert made.argv[-3:] == (sys.executable, "-m", "wordrun.launch.elastic.guardian")
    assert "-bind-to" in made.argv
    assert (made.ranks.layout, made.env["WORDRUN_WORLD_SIZE"]) == ((2, 2), "4")
    assert "WORDRUN_STATUS_DIR" not in made.env  # rank_env.sh would report a guardian as a rank
    assert VARIABLE in made.env  # so that launchers that forward named variables alone forward it
    assert made.options.retries == 10


def test_variables_of_a_rank_under_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks that read SLURM's see the ranks, not the guardians, and no node without ranks."""
    given = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
    for name, value in {**given, "WORDRUN_LAUNCH_ID": "7-a"}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = socket.socketpair()
    with theirs:
        made = guardian.Guardian.__new__(guardian.Guardian)
        made.link, made.node = Link(ours), 2
        made.setup, made.layout = {"restarts": 4}, [3, 0, 2]
        found = guardian.environment(made, 4, {"generation": 2, "port": 1234, "env": {"WORDRUN_RESUME": "auto"}})
        ours.close()
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "3,2",
        "MASTER_PORT": "1234",
        "WORDRUN_LAUNCHER": "local",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "WORDRUN_RESUME": "auto",
    }
    assert {name: found[name] for name in expected} == expected
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & {*found}


def test_a_guardian_started_by_hand_says_who_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert guardian.main() == 2
    assert capsys.readouterr().err == "launch: guardians are started by launch --elastic, not directly\n"


class Head:
    """``launch``'s side, with the guardians of two nodes played by the test."""

    def __init__(self, folder: Path, left: int = 10, *options: str) -> None:
        Path("hosts").write_text(f"{os.uname().nodename}\nlocalhost\n")
        made = plan(*options, "--launcher", "hydra", "--hostfile", "hosts", "-n", "4", "python", "train.py")
        self.said: list[str] = []
        self.folder, self.output, self.retries = folder, Output(), Retries(left)
        self.control = GuardianControl(made, self.retries, self.output, str(folder), None, self.said.append)
        address, port, self.secret = self.control.connections.contact.split()
        self.nodes = [Link(socket.create_connection((address, int(port)))) for _ in range(2)]
        self.inbox: list[list[dict[str, Any]]] = [[], []]

    def say(self, at: int, event: str, **facts: Any) -> None:
        self.nodes[at].send(event=event, **facts)

    def both(self, event: str, *facts: dict[str, Any]) -> None:
        for node in range(2):
            self.say(node, event, **(facts[node] if facts else {"port": 5000 + node}))

    def hear(self, do: str, *nodes: int) -> list[dict[str, Any]]:
        """Return what both guardians, or those of ``nodes``, are told next."""
        nodes = nodes or (0, 1)
        while not all(self.inbox[node] for node in nodes):
            for key, _ in self.output.selector.select(0.05):
                key.data()
            self.control.look()
            for node in nodes:
                self.nodes[node].socket.settimeout(0.01)
                self.inbox[node] += self.nodes[node].receive() or []
        told = [self.inbox[node].pop(0) for node in nodes]
        assert [message["do"] for message in told] == [do] * len(nodes)
        return told

    def start(self) -> None:
        """Play the guardians until the ranks run."""
        if self.control.generation.number < 0:
            for node in range(2):
                self.say(node, "hello", secret=self.secret, node=node, host=f"node{node}")
            self.hear("setup")
            self.both("ready")
        self.hear("start")
        self.both("started", {"pids": {0: 100, 1: 101}}, {"pids": {2: 102, 3: 103}})
        self.hear("go")

    def exits(self, rank: int, status: int) -> None:
        facts = {"status": status, "memory": "", "mpi": False, "stopped": False}
        self.say(rank // 2, "exit", rank=rank, pid=100 + rank, **facts)

    def reports(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.iterdir()}

    def close(self) -> None:
        self.control.kill()
        self.output.selector.close()
        for link in self.nodes:
            link.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    (tmp_path / "status").mkdir()
    found = Head(tmp_path / "status")
    yield found
    found.close()


def test_a_failure_that_follows_from_a_kill_is_not_the_cause(head: Head) -> None:
    """However late the kill is reported, within the time that launch waits for it."""
    head.start()
    assert head.control.pids() == {0: 100, 1: 101, 2: 102, 3: 103}
    head.exits(0, 1)
    head.exits(3, 137)
    head.hear("end")
    head.both("ended")
    head.start()
    assert head.reports() == {}
    assert head.said == ["rank 3 was killed (SIGKILL, not for lack of memory on this host): restarting the ranks"]
    assert [(fault["rank"], fault["pid"], fault["cause"]) for fault in head.retries.faults] == [(3, 103, "SIGKILL")]


def test_ranks_are_reported_as_by_rank_env_sh(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FIRST_CAUSE_S", 0.0)
    head.start()
    head.exits(2, 7)
    for rank in (0, 1, 3):
        head.exits(rank, 0)
    head.hear("leave")
    assert head.reports() == {"2": "7 node1\n", "ended-node0": "0\n1\n", "ended-node1": "3\n"}
    head.control.finish()
    assert head.control.lost == ""


def test_the_answer_to_an_earlier_question_does_not_count(head: Head) -> None:
    """A rank is killed while another node still starts its own."""
    for node in range(2):
        head.say(node, "hello", secret=head.secret, node=node, host=f"node{node}")
    head.hear("setup")
    head.both("ready")
    assert [message["port"] for message in head.hear("start")] == [int(head.control.plan.env["MASTER_PORT"])] * 2
    head.say(0, "started", pids={0: 100, 1: 101})
    head.exits(1, 137)
    head.hear("end")
    head.say(1, "started", pids={2: 102, 3: 103})
    head.both("ended")
    assert [message["port"] for message in head.hear("start")] == [5000, 5000]


def test_a_job_launches_with_guardians() -> None:
    script = inner(parse(["--elastic", "-n", "4", "python"]), SCHEDULERS["slurm"])
    assert script == ["launch", "-n", "4", "--retries", "10", "--elastic", "--", "python"]


def test_a_guardian_that_is_lost_ends_the_others(head: Head) -> None:
    head.start()
    head.nodes[1].close()
    while not head.said:
        for key, _ in head.output.selector.select(0.05):
            key.data()
    head.nodes[0].socket.settimeout(60)
    assert head.nodes[0].receive() is None
    assert head.control.lost == "the guardian on node1"
    assert head.said == ["the guardian on node1 has ended"]


def test_a_spare_node_takes_the_place_of_a_lost_one_which_is_spare_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss in the midst of a restart, and one of the last node, which leaves nothing to continue on."""
    monkeypatch.setattr(nodes, "FIRST_TRY_S", 0.0)
    (tmp_path / "status").mkdir()
    found = Head(tmp_path / "status", 10, "--oversubscribe", "--spare-nodes", "1")
    again: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    launcher = subprocess.Popen(["sleep", "60"])

    def start_guardian(made: LaunchPlan, env: Mapping[str, str]) -> Any:
        again.append((nodes_of(made), env))
        return launcher

    found.control.begin(start_guardian)
    first, second = os.uname().nodename, "localhost"
    found.start()
    assert found.control.plan.ranks.layout == (4,)
    found.exits(0, 137)
    found.hear("end")
    found.nodes[0].close()
    (told,) = found.hear("end", 1)
    assert found.said[1] == f"the guardian on node0 has ended: restarting 4 ranks (4 on {second})"
    assert [fault["cause"] for fault in found.retries.faults] == ["SIGKILL", "lost guardian"]
    found.say(1, "ended", port=5000)
    found.say(1, "ended", port=5001)
    (told,) = found.hear("start", 1)
    assert (told["layout"], told["port"], told["env"]["WORDRUN_HOSTS"]) == ([0, 4], 5000, second)
    found.say(1, "started", pids={rank: 200 + rank for rank in range(4)})
    found.hear("go", 1)
    while not again:
        found.control.look()
    assert again == [((first,), {VARIABLE: f"{found.control.connections.contact} 0"})]
    assert found.control.nodes.successor() is None, "it cannot take the place of the first launcher yet"
    address, port, _ = found.control.connections.contact.split()
    found.nodes[0] = Link(socket.create_connection((address, int(port))))
    found.say(0, "hello", secret=found.secret, node=0, host="node0")
    found.hear("setup", 0)
    found.say(0, "ready", port=5002)
    while 0 not in found.control.nodes.ready:
        for key, _ in found.output.selector.select(0.05):
            key.data()
    assert found.control.state == "running", "the ranks need not notice"
    assert found.control.nodes.successor() is launcher
    launcher.kill()
    launcher.wait()
    found.nodes[1].close()
    found.hear("end", 0)
    found.say(0, "ended", port=5003)
    (told,) = found.hear("start", 0)
    assert (told["layout"], told["port"]) == ([4, 0], 5003)
    found.nodes[0].close()
    while not found.control.lost:
        for key, _ in found.output.selector.select(0.05):
            key.data()
    assert found.control.lost == "the guardian on node0"
    found.close()


def test_a_guardian_that_has_died_before_it_connected_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher may notice, or not."""
    for notices in (True, False):
        (tmp_path / f"{notices}").mkdir()
        found = Head(tmp_path / f"{notices}")
        found.say(0, "hello", secret=found.secret, node=0, host="node0")
        monkeypatch.setattr(control, "ANSWER_S", 60.0 if notices else 0.0)
        found.nodes[1].close()
        told, asked = found.nodes[0], []
        told.socket.settimeout(0.01)
        while not asked:
            for key, _ in found.output.selector.select(0.05):
                key.data()
            asked = told.receive() or []
        found.say(0, "ready", port=5000)
        while not found.control.lost:
            for key, _ in found.output.selector.select(0.05):
                key.data()
            found.control.look()
            if notices and found.control.nodes.ready:
                found.control.finish()
        assert found.control.lost == "the guardian on localhost"
        how = "has ended" if notices else "has not connected for 0 seconds"
        assert found.said == [f"the guardian on localhost {how}"]
        found.close()


def test_a_guardian_that_imports_has_more_time_than_one_that_has_not_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Answers(3)
    assert found.late({0}) is None, "nobody is ready"
    monkeypatch.setattr(control, "ANSWER_S", 0.0)
    found.wait_for_ready()
    assert found.add(0, {}) is None
    assert found.late({0, 1}) == (2, 0.0)
    assert found.late({0, 1, 2}) is None
    assert [found.add(node, {}) for node in (1, 2)] == [None, {0: {}, 1: {}, 2: {}}]
    found.ask({1, 2})
    assert found.late({0, 1, 2}) == (1, 0.0)
    assert found.add(1, {}) is None
    assert found.late({0, 1, 2}) == (2, 0.0)


def test_silent_strangers_do_not_keep_guardians_out(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", 0.1)
    address, port, _ = head.control.connections.contact.split()
    silent = [socket.create_connection((address, int(port))) for _ in range(300)]
    head.start()
    while len(head.output.selector.get_map()) > 3:  # the port and two guardians
        for key, _ in head.output.selector.select(0.05):
            key.data()
        head.control.look()
    for each in silent:
        each.settimeout(60)
        assert each.recv(1) == b""
        each.close()


def test_a_guardian_that_says_something_else_is_named(head: Head) -> None:
    head.start()
    head.say(1, "exit", rank=4, pid=1, status=0, memory="", mpi=False, stopped=False)
    while not head.said:
        for key, _ in head.output.selector.select(0.05):
            key.data()
    (said,) = head.said
    assert said.startswith('the guardian on node1 has sent {"event": "exit", "rank": 4,')
    assert head.control.lost == "the guardian on node1"


def test_guardians_of_one_host_are_told_apart(head: Head) -> None:
    """Or the second one of them to be lost at a step would seem to be lost twice."""
    for node in range(2):
        head.say(node, "hello", secret=head.secret, node=node, host="same")
    head.hear("setup")
    head.nodes[1].close()
    while not head.control.lost:
        for key, _ in head.output.selector.select(0.05):
            key.data()
    assert head.control.lost == "the guardian on same (node 1)"


def test_guardians_that_are_lost_together(head: Head) -> None:
    """What one selection has found is acted on, though the first loss closes all connections."""
    head.start()
    ready = list(head.output.selector.get_map().values())
    for node in head.nodes:
        node.close()
    for key in ready:
        key.data()
    assert len(head.said) == 1
    assert head.control.lost


def test_a_launch_that_is_being_stopped_starts_nothing(head: Head) -> None:
    head.start()
    head.exits(3, 137)
    head.hear("end")
    head.control.stop()
    head.hear("leave")
    head.control.finish()
    assert not head.control.lost


def test_messages_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        theirs.sendall(b'{"a": 1}\n{"b"')
        assert link.receive() == [{"a": 1}]
        theirs.sendall(b": 2}\n")
        assert link.receive() == [{"b": 2}]
        for other in (b"GET / HTTP/1.1", b"[" * 60_000, b"[1]", b"\xff", b"\x00", b"9" * 5000, b'"\\ud800"'):
            with pytest.raises(UnfitError):
                message_in(other)
        link.close()


def test_importing_for_the_ranks_starts_no_device(command: Command) -> None:
    """A process that has started CUDA cannot be forked. A module that is renamed fails here, and not in a guardian."""
    program = f"""
import importlib
for name in ("torch", *{guardian.FOR_WORDRUN!r}):
    importlib.import_module(name)
import torch
print(torch.cuda.is_initialized())
"""
    done = command(sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
