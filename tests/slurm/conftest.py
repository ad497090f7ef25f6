"""A real SLURM cluster of four nodes on this machine, for the length of the session.

Debian's SLURM lets one host run several slurmd. All of the cluster lies in one temporary folder and listens on ports
that were free, so two suites on one machine do not meet; the only thing outside is a line in /etc/hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("n1", "n2", "n3", "n4")
HOSTS = Path("/etc/hosts")
HOSTS_MARK = "# wordrun's tests, process"
# cred_expire is also how long a requeued job waits before it starts again (120 s unless told), KillWait how long a
# cancelled job has between SIGTERM and SIGKILL. TreeWidth: slurmctld speaks to each node itself, so that a node that
# is down holds no other up. The scheduler's intervals are for jobs that start at once, not for thousands of them.
CONF = """\
ClusterName=wordrun
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5{munge}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
KillWait=5
ReturnToService=1
TreeWidth=65533
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The running cluster, as tests see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = contextlib.ExitStack()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        """The slurmd of each node."""
        self._started: list[subprocess.Popen[str]] = []

    def start_nodes(self) -> None:
        """Start each slurmd that does not run: Debian's crashes now and then when two steps start at once."""
        for name in NODES:
            if name not in self.nodes or self.nodes[name].poll() is not None:
                daemon = _daemon(self, f"slurmd-{name}", "slurmd", "-D", "-N", name)
                self.nodes[name] = self.daemons.enter_context(daemon)

    def run(self, *words: str | Path, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with this cluster as its SLURM; fail on a hang."""
        process = self.start(*words, **env)
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def outcome(self, process: subprocess.Popen[str], timeout: float) -> int:
        """Return the exit status of a started process; fail with what it printed and SLURM's state on a hang."""
        try:
            return process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            state = self.run("squeue", "--steps").stdout + self.run("scontrol", "show", "step").stdout
            self.run("scancel", "--signal=ABRT", "--user=root")  # Python's faulthandler prints the stacks
            time.sleep(2)
            self.run("scancel", "--user=root")
            stdout, stderr = process.communicate(timeout=60)
            pytest.fail(f"no end after {timeout:g} s\n{state}\n{stdout}\n{stderr}\n{self.logs()}", pytrace=False)

    def start(self, *words: str | Path, **env: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, for signals; what is left of it after the test is killed."""
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment, **env},
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def set_node(self, name: str, state: str) -> None:
        """Set a node ``down`` or ``resume`` it."""
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", "reason=test").check_returncode()

    def node_states(self) -> dict[str, str]:
        """Return what sinfo says of each node: idle, mixed, down, ...; a ``*`` behind it says that it is silent."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, timeout: float = 30) -> None:
        """Wait until no job is left and all nodes are idle; fail with what there is instead, and the logs."""

        def idle() -> bool:
            quiet = self.node_states() == dict.fromkeys(NODES, "idle")
            return quiet and not self.run("squeue", "--noheader").stdout

        def complaint() -> str:
            shown = self.run("sinfo", "--Node", "--long").stdout + self.run("squeue").stdout
            return f"SLURM is not idle after {timeout:g} s\n{shown}\n{self.logs()}"

        _wait(idle, timeout, complaint)

    def clear(self, timeout: float = 30) -> None:
        """End all that a test left: its jobs, its processes and its nodes that are down."""
        self.run("scancel", "--user=root")
        sessions = {process.pid for process in self._started}
        # Most have ended, and another process may have the number of one by now.
        _kill(lambda pid: os.getsid(pid) in sessions and _uses(pid, self.environment["SLURM_CONF"]))
        for process in self._started:
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream
                stream.close()
        self._started.clear()
        self.start_nodes()
        for name, state in self.node_states().items():
            if state.startswith(("down", "drain")):
                self.set_node(name, "resume")
        self.wait_idle(timeout)

    def logs(self, lines: int = 15) -> str:
        """Return the end of each daemon's log."""
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            tails += [f"== {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(tails)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the cluster, and take it down at the end, whatever happened."""
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_resolvable_nodes())
        stack.callback(_kill, lambda pid: _uses(pid, made.environment["SLURM_CONF"]))
        _configure(made.folder, munge=stack.enter_context(_munge(made)))
        stack.enter_context(_daemon(made, "slurmctld", "slurmctld", "-D"))
        stack.enter_context(made.daemons)
        made.start_nodes()
        made.wait_idle()
        yield made


@pytest.fixture(autouse=True)
def _clean_cluster(cluster: Cluster) -> Iterator[None]:
    """Give the next test an idle cluster."""
    yield
    cluster.clear()


def _configure(folder: Path, munge: str) -> None:
    """Write slurm.conf, with ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(1 + len(NODES))]
        controller, *ports = [each.getsockname()[1] for each in sockets]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost Port={port} CPUs=4 RealMemory=4000"
        for name, port in zip(NODES, ports, strict=True)
    )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONF.format(port=controller, munge=munge, folder=folder, nodes=nodes))


@contextlib.contextmanager
def _daemon(cluster: Cluster, name: str, *words: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon in the foreground, so that it is our child; it ends with us even where pytest is killed."""
    with (cluster.folder / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cluster.folder,
            env={**os.environ, **cluster.environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _munge(cluster: Cluster) -> Iterator[str]:
    """Yield what AuthInfo says of munge: nothing where the system's answers, else the socket of one that we start."""
    if _munge_answers():
        yield ""
        return
    folder = cluster.folder / "munge"
    folder.mkdir()
    key, where = folder / "key", folder / "socket"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    # munged wants its socket where other users reach it, which pytest's folders are not; --force makes that a warning.
    files = {"key-file": key, "socket": where, "log-file": folder / "log", "pid-file": folder / "pid"}
    options = [f"--{name}={path}" for name, path in {**files, "seed-file": folder / "seed"}.items()]
    with _daemon(cluster, "munged", "munged", "--foreground", "--force", *options):
        _wait(lambda: _munge_answers("--socket", str(where)), 10, lambda: f"munged does not answer\n{cluster.logs()}")
        yield f",socket={where}"


def _munge_answers(*options: str) -> bool:
    made = subprocess.run(["munge", "--no-input", *options], capture_output=True)
    return not subprocess.run(["unmunge", *options], input=made.stdout, capture_output=True).returncode


@contextlib.contextmanager
def _resolvable_nodes() -> Iterator[None]:
    """Give the nodes' names an address while the cluster runs, by a line of our own.

    Another suite's line would go when that suite ends, and a killed suite's line goes here.
    """
    ours = f"127.0.0.1 {' '.join(NODES)} {HOSTS_MARK} {os.getpid()}\n"
    _edit_hosts(lambda line: HOSTS_MARK not in line or Path("/proc", line.split()[-1]).exists())
    if all(map(_resolves, NODES)) and HOSTS_MARK not in HOSTS.read_text():
        yield
        return
    try:
        _edit_hosts(lambda line: True, ours)
        yield
    finally:
        _edit_hosts(lambda line: line != ours)


def _edit_hosts(keep: Callable[[str], bool], more: str = "") -> None:
    """Edit /etc/hosts in place, as containers mount it, and one suite at a time."""
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        old = file.read()
        new = "".join(filter(keep, old.splitlines(keepends=True))) + more
        if new != old:
            file.seek(0)
            file.write(new)
            file.truncate()


def _resolves(name: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(name, None))
    return False


def _kill(chosen: Callable[[int], bool]) -> None:
    """Kill this machine's processes that ``chosen`` says yes to, never this one."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and chosen(pid):
                os.kill(pid, signal.SIGKILL)


def _uses(pid: int, conf: str) -> bool:
    """Say whether a process was started with this cluster as its SLURM: a daemon, a step's or task's process."""
    return f"SLURM_CONF={conf}" in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")


def _wait(reached: Callable[[], bool], timeout: float, complaint: Callable[[], str]) -> None:
    end = time.monotonic() + timeout
    while not reached():
        if time.monotonic() > end:
            pytest.fail(complaint(), pytrace=False)
        time.sleep(0.1)
