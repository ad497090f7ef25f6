"""``--cpu-times``: the CPU seconds of each test and of what it started, which hardly depend on other processes."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

BEGUN = pytest.StashKey[float]()
MOST = 60
"""Tests to list."""


def seconds() -> float:
    """Return what this process and its descendants have used; a process whose parent has ended, as SLURM's, is none."""
    used, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15]))  # with the children that have ended
    ours, count = {os.getpid()}, 0
    while len(ours) > count:
        count = len(ours)
        ours |= {pid for pid, parent in parents.items() if parent in ours}
    return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the start."""
    item.config.stash[BEGUN] = seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send the difference to the main process."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu", seconds() - item.config.stash[BEGUN]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List tiers and files, and the tests that use most."""
    tests, files = collections.Counter[str](), collections.Counter[str]()
    for report in terminalreporter.stats.get("", []):
        for spent in (value for name, value in report.user_properties if name == "cpu"):
            file = report.nodeid.partition("::")[0]
            tests[report.nodeid] += spent
            files.update({file: spent, file.rpartition("/")[0]: spent})
    terminalreporter.section("CPU seconds")
    for name, spent in [*files.most_common(), *tests.most_common(MOST)]:
        terminalreporter.write_line(f"{spent:7.1f} {name}")
