"""Tiers, and what every test may count on.

A test belongs to the tier that its folder names: unit, dist, mpi, slurm, pbs or gpu. A tier whose means are missing is
skipped with what it needs; under ``CI=true`` a tier that ought to run and did not makes the whole run fail.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import composed_once
import hypothesis
import pytest
import stand_in
from xdist.scheduler import LoadFileScheduling

import cpu_times
import forked
from programs import Programs

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
gc.set_threshold(20_000, 50, 50)  # as in tests/undrawn
sys.dont_write_bytecode = False  # of the tests, which every worker and session would compile anew; see pytest_configure
TIERS = ("unit", "dist", "mpi", "slurm", "pbs", "gpu")
# Tests of real processes and schedulers, which depend on the machine's load, are run once more if they fail.
TRIED_TWICE = ("dist", "mpi", "slurm", "pbs")
# Files of the tier dist whose ranks wait or are alone most of the time: they need not wait for each other.
MOSTLY_ONE_CORE = ("test_compile.py", "test_hangs.py", "test_setup.py", "test_startup.py", "test_tutorials.py")
_TIME_LIMIT = pytest.StashKey[Any]()
# What CI's machines have: none has a GPU or PBS.
EXPECTED_IN_CI = ("unit", "dist", "mpi", "slurm")


def _missing(tier: str) -> str | None:
    """Return what ``tier`` lacks on this machine, or None."""
    if tier == "mpi" and not ((BIN / "mpiexec").exists() or shutil.which("mpiexec")):
        return "an mpiexec: pip install 'wordrun[mpich]'"
    if tier == "slurm":
        for daemon in ("slurmctld", "slurmd", "munged"):
            if not shutil.which(daemon):
                return f"{daemon}: apt-get install slurm-wlm munge"
        return None if os.geteuid() == 0 else "root, which starts the cluster's daemons"
    if tier == "pbs":
        if not os.path.exists("/etc/pbs.conf"):
            return "OpenPBS, which no Debian has: build it from its sources, and run its pbs_postinstall"
        return None if os.geteuid() == 0 else "root, which makes the hosts' namespaces"
    if tier == "gpu" and os.environ.get("WORDRUN_GPU_TESTS") != "cpu":
        import torch

        return None if torch.accelerator.is_available() else "an accelerator that torch finds"
    return None


# On a busy machine any example may take longer than the 200 ms that Hypothesis allows.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cpu-times``."""
    parser.addoption("--cpu-times", action="store_true", help="show the CPU seconds of tiers, files and tests")


def pytest_configure(config: pytest.Config) -> None:
    """Start every process with the usual reactions to signals, the usual buffering, and the usual caches of bytecode.

    Unbuffered, ``print`` writes its arguments one by one, and under a plain mpiexec lines of several ranks mix.
    Container images often forbid bytecode files: then each process would compile wordrun anew, for 0.2 s.

    Under nohup, or in the background of a script, we ignore SIGHUP or SIGINT, and so would all that we start. A handler
    does as little, and a started process does not inherit it.
    """
    if config.option.cpu_times:
        config.pluginmanager.register(cpu_times)
    os.environ.pop("PYTHONUNBUFFERED", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its folder's tier, and skip those that this machine cannot run."""
    again = config.pluginmanager.hasplugin("rerunfailures") and not config.option.usepdb
    missing = {tier: _missing(tier) for tier in TIERS}
    for item in items:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker(getattr(pytest.mark, tier))
        if again and tier in TRIED_TWICE:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if missing[tier]:
            item.add_marker(pytest.mark.skip(reason=f"needs {missing[tier]}"))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Keep a test's time limit for its second attempt: pytest-timeout sets one timer, which the first failure ends."""
    item.stash[_TIME_LIMIT] = settings


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the timer again for a second attempt."""
    if getattr(item, "execution_count", 1) > 1 and _TIME_LIMIT in item.stash:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[_TIME_LIMIT])


class OneAtATime(LoadFileScheduling):
    """Gives whole files to the workers of pytest-xdist, and all files of a tier that needs the machine to one worker.

    The marker ``xdist_group`` would do, but pytest-xdist 3.8 silently ignores it with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        tier, file = nodeid.partition("::")[0].split("/")[1:3]
        needs_all = tier in ("dist", "slurm", "pbs") and file not in MOSTLY_ONE_CORE
        return tier if needs_all else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneAtATime:
    """Replace the scheduler that ``--dist`` names."""
    return OneAtATime(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tiers ran, and which tests passed or failed only at their second attempt, with the first failure."""
    if failed := terminalreporter.stats.get("rerun"):
        terminalreporter.section("tests that failed at their first attempt: each is a bug, please report it")
        for report in failed:
            terminalreporter.write_line("\n".join([f"{report.nodeid} ({report.when})", *_why(report)]))
    passed, lacks = _passed_by_tier(terminalreporter), _lacks(terminalreporter)
    terminalreporter.section("tiers")
    for tier in TIERS:
        lacking = f"did not run; needs {lacks[tier]}" if tier in lacks else "no test passed"
        state = f"{passed[tier]} passed" if passed[tier] else lacking
        terminalreporter.write_line(f"{tier:<6} {state}")


def _lacks(reporter: Any) -> dict[str, str]:
    """Return what tiers lack, by the reports of their tests: looking again would import torch once more."""
    reasons: dict[str, collections.Counter[str]] = {}
    for report in reporter.stats.get("skipped", []):
        tier = reasons.setdefault(report.nodeid.split("/")[1], collections.Counter())
        tier[report.longrepr[2].removeprefix("Skipped: needs ")] += 1
    return {tier: counted.most_common(1)[0][0] for tier, counted in reasons.items()}


def _why(report: pytest.TestReport) -> list[str]:
    """Return where a test failed, its message, and what it printed; of long ones the begin and the end.

    The message of a failed process is its output, at whose end stands the cause.
    """
    lines = report.longreprtext.splitlines()
    message = [line for line in lines if line.startswith("E ")] or lines
    where = [line for line in lines if re.match(r"\S+\.py:\d+: ", line)]
    printed = [[f"{title}:", *text.splitlines()] for title, text in report.sections]
    return [*where, *(line for part in (message, *printed) for line in _ends_of(part))]


def _ends_of(lines: list[str], first: int = 15, last: int = 45) -> list[str]:
    """Return the first and last of many lines, and how many are between them."""
    between = len(lines) - first - last
    return [*lines[:first], f"... ({between} lines)", *lines[-last:]] if between > 1 else lines


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run in CI in which a tier that ought to run passed nothing."""
    option, folders = session.config.option, {folder.removeprefix("tests/") for folder in session.config.args}
    whole = not option.keyword and not option.markexpr and folders <= {"tests", *TIERS}
    in_worker = hasattr(session.config, "workerinput")  # of pytest-xdist; the main process sees all reports
    if not in_worker:
        _remove_shared_memory()
    if os.environ.get("CI") != "true" or not whole or in_worker:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed = _passed_by_tier(reporter)
    if any(not passed[tier] for tier in EXPECTED_IN_CI if folders & {"tests", tier}):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove what an earlier session left, because MPICH fails if it finds a segment of the name that it chooses."""
    if not hasattr(session.config, "workerinput"):
        _remove_shared_memory()


def _remove_shared_memory() -> None:
    """Remove the shared memory of MPI ranks that tests have killed: older segments that no process maps.

    A segment that has just been created is not mapped by all ranks yet, which may be those of another session's tests.
    """
    begun = time.time() - 300
    segments = {path for path in Path("/dev/shm").glob("mpich_shm_*") if path.stat().st_mtime < begun}
    if not segments:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            segments = {segment for segment in segments if segment.name not in text}
    for segment in segments:
        segment.unlink(missing_ok=True)


def _passed_by_tier(reporter: pytest.TerminalReporter) -> dict[str, int]:
    passed = dict.fromkeys(TIERS, 0)
    for report in reporter.stats.get("passed", []):
        passed[report.nodeid.split("/")[1]] += 1
    return passed


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test in an empty folder, without the developer's own settings or a launcher's variables."""
    for name in list(os.environ):
        if name.startswith(("WORDRUN_", "WANDB_", "PMI_", "SLURM_", "PBS_", "PALS_", "OMPI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORDRUN_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_MODE", "disabled")  # importing it takes half as long as torch; its own tests enable it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "undrawn"))  # see there; without it, runs are drawn
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> None:
    composed_once.start()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the socket of a process that has imported torch, and in whose forks programs of tests can run."""
    path = tmp_path_factory.mktemp("programs") / "socket"
    Programs(path)
    return path


@pytest.fixture(autouse=True)
def _forked_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the marker says so, let programs run in forks, whoever starts them: see ``stand_in``."""
    marker = request.node.get_closest_marker("forked_programs")
    if marker and marker.args != (False,):
        monkeypatch.setenv(stand_in.VARIABLE, str(request.getfixturevalue("programs")))


@pytest.fixture(autouse=True)
def _blame_the_culprit() -> Iterator[None]:
    """Find a file that was left open in the test that opened it, rather than in a later one.

    What outlives a test is not looked at again, so that this costs no time.
    """
    yield
    gc.collect()
    gc.freeze()


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command() -> Command:
    """Run a command to its end and return what it printed and its status; fail on a hang."""

    def run(*words: str | Path, timeout: float = 90, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
        )
        done.stdout = forked.without_gloo(done.stdout)
        return done

    return run


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts import torchvision, from the folder into which bin/test installs it."""
    if folders := sorted(BIN.parent.glob("torchvision-*[0-9]")):
        monkeypatch.setenv("PYTHONPATH", str(folders[-1]), prepend=os.pathsep)
    elif not importlib.util.find_spec("torchvision"):
        pytest.skip("needs torchvision: bin/test, or pip install 'wordrun[vision]'")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command without waiting for it; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(subprocess.Popen([str(word) for word in words], **pipes))
        return started[-1]

    yield begin
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def ranks(command: Command) -> Command:
    """Run a Python script (or ``-m module`` words) on N ranks under mpiexec or torchrun, or by tests/forked.py."""

    def run(
        n: int, *words: str | Path, under: str = "mpiexec", timeout: float = 90, **env: str
    ) -> subprocess.CompletedProcess[str]:
        if under == "fork":
            done = forked.run(n, [str(word) for word in words], {**os.environ, **env}, timeout)
            done.stdout = forked.without_gloo(done.stdout)
            return done
        starters: dict[str, Sequence[str | Path]] = {
            "mpiexec": ("mpiexec", "-n", str(n), sys.executable),
            "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)),
        }
        return command(*starters[under], *words, timeout=timeout, **env)

    return run
