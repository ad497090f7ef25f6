"""Find the hosts on which the launcher can no longer start a process, after a launch that failed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace

from wordrun.launch import processes
from wordrun.launch.job import short
from wordrun.launch.plan import LaunchPlan, on_one_host
from wordrun.launch.rank_starter import RankStarter
from wordrun.launch.schedulers import SCHEDULERS

# A host that does not answer within this time [s] is lost, and this many hosts are asked at once.
PATIENCE_S, ASKED_AT_ONCE = 20.0, 64


def lost_hosts(plan: LaunchPlan) -> tuple[str, ...]:
    """Return those hosts of a plan on which its launcher cannot run ``true`` now, by their short names.

    This host is not asked, and neither are the hosts of a plan with one host only. In a job that is ending, nothing can
    be started anywhere, and no host counts as lost.
    """
    here = short(socket.gethostname())
    others = [node for node, host in enumerate(plan.job.hosts) if short(host) != here]
    if plan.ranks.nodes < 2 or not plan.launcher.in_between:
        return ()
    lost: list[int] = []
    for first in range(0, len(others), ASKED_AT_ONCE):
        plans = [(node, _probe(plan, node)) for node in others[first : first + ASKED_AT_ONCE]]
        asked = [(node, each, _start(each)) for node, each in plans]
        end = time.monotonic() + PATIENCE_S
        for node, each, probe in asked:
            try:
                answers = probe.wait(max(0.0, end - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                answers = False
            if not answers:
                lost.append(node)
                processes.send(probe.pid, signal.SIGKILL, group=True)
            for path in each.files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
    if lost and SCHEDULERS[plan.job.scheduler].is_ending(plan.job):
        return ()
    if lost:
        processes.end_all(0)  # what a launcher that was killed has left behind, such as ssh
    return tuple(short(plan.job.hosts[node]) for node in lost)


def _probe(plan: LaunchPlan, node: int) -> LaunchPlan:
    """Return the plan that runs ``true`` on one host of ``plan``."""
    options = replace(plan.options, command=("true",), cpu_bind=None)
    return on_one_host(replace(plan, starter=RankStarter(), options=options), node, os.environ)


def _start(plan: LaunchPlan) -> subprocess.Popen[bytes]:
    for path, text in plan.files.items():
        with open(path, "w") as file:
            file.write(text)
    return subprocess.Popen(
        plan.argv,
        env={**plan.environment(os.environ), "WORDRUN_STATUS_DIR": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=processes.before_exec(own_group=True, death_signal=plan.launcher.death_signal),
    )
