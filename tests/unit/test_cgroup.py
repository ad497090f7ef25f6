"""What control groups say: the cores and the memory that are left, and the processes killed for memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wordrun.common import cgroup
from wordrun.launch.oom import OomWatch

if TYPE_CHECKING:
    from conftest import Command

LIMIT = 64 * 2**20
LINE = "3,9,9,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:9kB, anon-rss:3145728kB, UID:{user}"


def kernel(root: Path, group: str, **files: str) -> None:
    """Write what the kernel would show a process in ``group``, with these files below ``sys/fs/cgroup``."""
    shown = {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in shown.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 3),
        ("2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_limit_of_cores(group: str, files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    kernel(tmp_path, group, **files)
    assert cgroup.cores(str(tmp_path)) == cores


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/", {}, 8 * 2**30),
        ("0::/a", {"a/memory.max": "max\n", "a/memory.current": "5\n"}, 8 * 2**30),
        ("0::/a/b", {"a/memory.max": "99", "a/memory.current": "70", "a/memory.stat": "inactive_file 10\n"}, 39),
        ("0::/a", {"a/memory.max": "9", "a/memory.current": "8", "a/memory.stat": "active_file 3\ninactive_file 4"}, 8),
        ("0::/a", {"a/memory.max": "1000", "a/memory.current": "1700"}, 0),
        ("4:memory:/limit", {"memory/limit/memory.limit_in_bytes": "9", "memory/limit/memory.usage_in_bytes": "7"}, 2),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "1000",
                "memory/a/memory.usage_in_bytes": "700",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            350,
        ),
    ],
)
def test_the_memory_that_is_left(group: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    kernel(tmp_path, group, **files)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {8 * 2**20} kB\n")
    assert cgroup.memory(str(tmp_path)) == left


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/user.slice/app", "user.slice/memory.events"),  # the nearest group that has the controller
        ("0::/", "memory.events"),  # in a container
        ("3:cpu:/a\n4:memory:/a\n0::/", "memory/a/memory.oom_control"),
        ("4:memory:/docker/abc", "memory/memory.oom_control"),
        # srun's ranks run in another step than the script with launch, or in one that began later
        ("0::/slurmstepd.scope/job_7/step_batch/user/task_0", "slurmstepd.scope/job_7/step_0/memory.events"),
        ("4:memory:/slurm/uid_1/job_7/step_batch/task_0", "memory/slurm/uid_1/job_7/step_0/task_1/memory.oom_control"),
    ],
)
def test_a_kill_is_seen_in_the_control_groups_of_a_job(group: str, file: str, tmp_path: Path) -> None:
    own = {f"{'memory/' * ('memory' in group)}{group.rpartition(':')[2].lstrip('/')}/{Path(file).name}": "oom_kill 2\n"}
    kernel(tmp_path, group, **(own if "job_" in group else {file: "low 0\noom 3\noom_kill 2\n"}))
    watch = OomWatch(str(tmp_path))
    assert watch.killed_for_memory() is None
    kernel(tmp_path, group, **{file: "low 0\noom 4\noom_kill 3\n"})
    found = watch.killed_for_memory()
    evidence = f"(oom_kill in {tmp_path}/sys/fs/cgroup/{file})"
    assert found == f"the kernel killed a process of this job because memory ran out {evidence}"


def test_the_kernel_log_names_the_process(tmp_path: Path) -> None:
    kernel(tmp_path, "0::/", **{"memory.events": "oom_kill 0\n"})
    watch = OomWatch(str(tmp_path))
    kernel(tmp_path, "0::/", **{"memory.events": "oom_kill 1\n"})
    log = tmp_path / "dev/kmsg"
    log.parent.mkdir()
    lines = [LINE.format(pid=41, user=os.getuid()), LINE.format(pid=42, user=os.getuid() + 1)]
    log.write_text("\n".join(lines))  # the second is somebody else's
    assert str(watch.killed_for_memory()).startswith("the kernel killed python (process 41, 3.0 GiB) because memory")


def test_without_control_groups_nothing_is_known(tmp_path: Path) -> None:
    assert OomWatch(str(tmp_path)).killed_for_memory() is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Return the list of processes of a real control group with little memory."""
    paths = cgroup.files("memory", "memory.events", "memory.oom_control")
    for parent in (Path(path).parent for path in paths):
        group = parent / f"wordrun-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limit = next(
            (group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()), None
        )
        try:
            if limit and limit.write_text(str(LIMIT)):
                yield group / "cgroup.procs"
                return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("needs the right to create control groups with a memory limit")


def within(group: Path) -> tuple[str, ...]:
    """Return the words before a command that is to run in ``group``."""
    return ("sh", "-c", f'echo $$ > {group}; exec "$@"', "sh")


def test_ranks_that_a_small_group_cannot_hold_are_refused(command: Command, small_group: Path) -> None:
    done = command(*within(small_group), "launch", "--dry-run", "-n", "2", sys.executable, "-c", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch: -n 2: 2 ranks need about 0.8 GB of memory to import torch, and 0.")
    assert command(*within(small_group), "launch", "-n", "2", "true").returncode == 0


@pytest.mark.parametrize("n", [1, 2])
def test_launch_says_that_a_rank_was_killed_for_memory(n: int, command: Command, small_group: Path) -> None:
    fill = "import os; x = bytearray((200 << 20) * (os.environ['RANK'] == '0'))"
    inside = f'echo $$ > {small_group}; exec "$@"'
    done = command("sh", "-c", inside, "sh", "launch", "--oversubscribe", "-n", str(n), sys.executable, "-c", fill)
    assert done.returncode == 137
    assert "launch: the kernel killed " in done.stderr
    assert "because memory ran out (oom_kill in " in done.stderr
