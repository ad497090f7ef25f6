"""A real OpenPBS of a head node and three hosts on this machine, for the length of the session.

Each is a set of Linux namespaces, with a host name, a network, processes and a PBS_HOME (/mnt) of its own, on the
machine's files. Nothing outside changes, and no packet leaves: the network is a bridge in the head's namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOSTS = ("h1", "h2", "h3")
ADDRESSES = {name: f"10.213.0.{number}" for number, name in enumerate(("head", *HOSTS), 1)}
INSTALLED = Path("/etc/pbs.conf")
EXEC = "".join(re.findall(r"^PBS_EXEC=(\S+)", INSTALLED.read_text(), re.MULTILINE)) if INSTALLED.exists() else ""
CONF = """\
PBS_EXEC={exec}
PBS_HOME=/mnt
PBS_SERVER=head
PBS_START_SERVER={head}
PBS_START_SCHED={head}
PBS_START_COMM={head}
PBS_START_MOM={host}
"""
# Root's jobs run as root, and jobs start at once.
QMGR = """\
create node h1
create node h2
create node h3
set node h1 resources_available.ncpus=4
set node h2 resources_available.ncpus=4
set node h3 resources_available.ncpus=4
set server acl_roots=root
set server flatuid=True
set server job_history_enable=True
set server scheduler_iteration=1
"""
# The user of most jobs: PBS's daemons signal no processes of root.
USER, UID = "ada", 31415
PATH = f"{EXEC}/bin:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"


class Cluster:
    """The running cluster, as tests see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inits: dict[str, int] = {}
        """The first process of each host."""
        self.home = Path(tempfile.mkdtemp(prefix="wordrun-pbs-", dir="/tmp"))
        """The user's, on all hosts."""
        os.chown(self.home, UID, UID)
        for name, line in (("passwd", f"{USER}:x:{UID}:{UID}::{self.home}:/bin/bash"), ("group", f"{USER}:x:{UID}:")):
            (folder / name).write_text(f"{Path('/etc', name).read_text()}{line}\n")

    def run(
        self, *words: str | Path, host: str = "head", timeout: float = 60, user: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the present folder, as root or as the ``user``."""
        enter = ["nsenter", "--all", f"--target={self.inits[host]}", "env", f"--chdir={os.getcwd()}", f"PATH={PATH}"]
        if user:
            who = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
            enter += [f"HOME={self.home}", f"USER={USER}", *who]
        return subprocess.run(
            [*enter, *map(str, words)], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def start_daemons(self, host: str) -> None:
        """Start PBS's daemons on a host."""
        with (self.folder / f"{host}.log").open("a") as log:
            words = ["nsenter", "--all", f"--target={self.inits[host]}", f"{EXEC}/libexec/pbs_init.d", "start"]
            subprocess.run(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=120)

    def kill_host(self, host: str) -> None:
        """Kill all processes of a host, PBS's too; its network stays, and nobody listens."""
        self.run("sh", "-c", "kill -KILL -1", host=host)

    def job(self, name: str) -> dict[str, Any]:
        """Return what qstat knows of a job, also after its end."""
        done = self.run("qstat", "-x", "-f", "-F", "json", name)
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(done.stdout)["Jobs"][name]
        return facts

    def wait(self, reached: Callable[[], Any], what: str, timeout: float = 60) -> None:
        """Wait until ``reached``; fail with what PBS's logs and the jobs' outputs say."""
        end = time.monotonic() + timeout
        while not reached():
            if time.monotonic() > end:
                paths = [*self.folder.glob("*/*_logs/*"), *self.folder.glob("*.log"), *Path().glob("*.o*")]
                tails = [f"== {path}\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths]
                pytest.fail("\n".join([f"not reached: {what}", *tails]), pytrace=False)
            time.sleep(0.2)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start the cluster; all of its processes end with the namespaces' first ones."""
    made = Cluster(tmp_path_factory.mktemp("pbs"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, made.home, ignore_errors=True)
        for name in ADDRESSES:
            stack.enter_context(_namespaces(made, name))
        _connect(made)
        for name in ADDRESSES:
            made.start_daemons(name)
        for name in HOSTS:  # output is copied rather than sent
            (made.folder / name / "mom_priv" / "config").write_text("$clienthost head\n$usecp *:/ /\n")
            made.run("pkill", "-HUP", "pbs_mom", host=name).check_returncode()
        for line in QMGR.splitlines():
            made.run("qmgr", "-c", line).check_returncode()
        made.wait(lambda: made.run("pbsnodes", "-aS").stdout.count(" free ") == len(HOSTS), "both hosts are free")
        yield made


@pytest.fixture(autouse=True)
def _clean_cluster(cluster: Cluster) -> Iterator[None]:
    """Give the next test an idle cluster."""
    yield
    jobs = [line.split()[0] for line in cluster.run("qstat").stdout.splitlines() if line[:1].isdigit()]
    if jobs:
        cluster.run("qdel", "-W", "force", *jobs)


@contextlib.contextmanager
def _namespaces(cluster: Cluster, name: str) -> Iterator[None]:
    """Make a host: what its daemons and jobs start lies in its namespaces, whose first process is bash."""
    namespaces = ["--net", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"]
    first = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", "while :; do sleep infinity; done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        cluster.wait(lambda: children.read_text().split(), f"{name} is there", 10)
        cluster.inits[name] = int(children.read_text())
        home, conf, names = (cluster.folder / f"{name}{suffix}" for suffix in ("", ".conf", ".hosts"))
        home.mkdir()
        home.chmod(0o755)
        conf.write_text(CONF.format(exec=EXEC, head=int(name == "head"), host=int(name != "head")))
        lines = [f"{address} {host}" for host, address in {"localhost": "127.0.0.1", **ADDRESSES}.items()]
        names.write_text("\n".join([*lines, ""]))
        for words in (
            ["hostname", name],
            ["ip", "link", "set", "lo", "up"],
            ["mount", "--bind", names, "/etc/hosts"],
            ["mount", "--bind", cluster.folder / "passwd", "/etc/passwd"],
            ["mount", "--bind", cluster.folder / "group", "/etc/group"],
            ["mount", "--bind", conf, INSTALLED],
            ["mount", "--bind", home, "/mnt"],
            ["mount", "-t", "tmpfs", "tmpfs", "/var/tmp"],
        ):
            cluster.run(*words, host=name).check_returncode()
        yield
    finally:
        first.kill()
        first.wait()


def _connect(cluster: Cluster) -> None:
    """Join the hosts' networks by a bridge on the head."""
    cluster.run("ip", "link", "add", "bridge0", "type", "bridge").check_returncode()
    for name in HOSTS:
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(cluster.inits[name])]
        words = ["ip", "link", "add", f"to-{name}", *peer]
        subprocess.run(["nsenter", "--net", f"--target={cluster.inits['head']}", *words], check=True)
        cluster.run("ip", "link", "set", f"to-{name}", "master", "bridge0", "up").check_returncode()
    for name, address in ADDRESSES.items():
        device = "bridge0" if name == "head" else "eth0"
        cluster.run("ip", "address", "add", f"{address}/24", "dev", device, host=name).check_returncode()
        cluster.run("ip", "link", "set", device, "up", host=name).check_returncode()
