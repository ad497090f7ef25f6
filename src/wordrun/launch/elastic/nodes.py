"""The nodes of ``launch --elastic``: how many ranks each gets, and how a lost one comes back."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from wordrun.launch import address
from wordrun.launch.elastic.connections import VARIABLE
from wordrun.launch.elastic.starter import nodes_of
from wordrun.launch.job import short
from wordrun.launch.plan import LaunchPlan, on_one_host
from wordrun.launch.rank_control import StartLauncher
from wordrun.launch.retries import port_taken

# A guardian is restarted on a lost node after the first of these times [s], then after twice as long, and so on.
FIRST_TRY_S, LONGEST_PAUSE_S = 2.0, 300.0


@dataclass
class Nodes:
    """The nodes that have guardians, or had them: first those on which the ranks began, then the spare ones."""

    plan: LaunchPlan
    ready: set[int] = field(default_factory=set)
    """The nodes whose guardians can start ranks."""
    ports: dict[int, int] = field(default_factory=dict)
    """A free port on each ready node, at which the ranks meet if rank 0 runs there."""
    port: int = 0
    """The port at which the ranks meet."""
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """The launchers that were started for lost nodes, and have not ended."""
    _can_move: bool = True
    """Whether the ranks may still change to another port if theirs is taken; they do so once."""
    _start: StartLauncher | None = None
    _tries: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When to restart a guardian on each lost node, and how long to wait after that."""

    def __post_init__(self) -> None:
        ranks = self.plan.ranks
        self.count = len(nodes_of(self.plan))
        spare = self.count - ranks.nodes
        self.layout = (*ranks.layout, *[0] * spare)
        """The ranks on each node."""
        self._room = (*ranks.layout, *[ranks.ppn] * spare)

    def best(self) -> tuple[int, ...] | None:
        """Return the layout of all ranks on the ready nodes, filled in order; None: these are too few."""
        layout: list[int] = []
        for node, most in enumerate(self._room):
            layout.append(min(most if node in self.ready else 0, self.plan.ranks.np - sum(layout)))
        return tuple(layout) if sum(layout) == self.plan.ranks.np else None

    def arrange(self) -> None:
        """Use the best layout for the next generation; there must be one."""
        best = self.best()
        assert best is not None
        self.layout = best

    def choose_port(self, *, first: bool) -> int:
        """Choose the port at which the ranks of this layout meet; ``first``: the one that the plan has chosen."""
        rank_0 = next(node for node, ranks in enumerate(self.layout) if ranks)
        self.port = int(self.plan.env["MASTER_PORT"]) if first else self.ports[rank_0]
        return self.port

    def port_taken(self, lines: Iterable[str]) -> bool:
        """Return whether ``lines`` report that the ranks' port is in use, and another may be tried; True only once."""
        chosen = self.plan.reasons["MASTER_PORT"] == "--env" and self.port == int(self.plan.env["MASTER_PORT"])
        if chosen or not self._can_move or not port_taken(lines, self.port):
            return False
        self._can_move = False
        return True

    def begin(self, start: StartLauncher) -> None:
        """Restart guardians on lost nodes from now on: ``start`` starts a launcher."""
        self._start = start

    def variables(self) -> dict[str, str]:
        """Return the variables whose values differ from those that the launch began with, because of this layout."""
        plan = self.plan
        used = [node for node, ranks in enumerate(self.layout) if ranks]
        if used == [*range(plan.ranks.nodes)]:
            return {}
        hosts = [plan.job.hosts[node] for node in used]
        found = {"WORDRUN_HOSTS": ",".join(hosts)} if "WORDRUN_HOSTS" in plan.env else {}
        if used[0] != 0 and len(used) > 1:  # else it is that of the first node, or this host's own
            found["MASTER_ADDR"], _, _ = address.of_first(hosts, plan.site, socket.gethostname())
        return found

    def named(self) -> str:
        """Return the layout for a message."""
        used = [f"{n} on {self.plan.job.hosts[node]}" for node, n in enumerate(self.layout) if n]
        count = sum(self.layout)
        return f"{count} rank{'s' * (count > 1)} ({', '.join(used[:4])}{', ...' * (len(used) > 4)})"

    def lose(self, node: int) -> None:
        """Schedule the restart of a guardian on a node."""
        self.ready.discard(node)
        self._tries[node] = time.monotonic() + FIRST_TRY_S, 2 * FIRST_TRY_S

    @property
    def has_lost(self) -> bool:
        """Whether a node has been lost, even if it has come back."""
        return bool(self._tries)

    def bring_back(self, contact: str) -> None:
        """Start guardians on lost nodes if it is time; ``contact`` tells them how to connect."""
        now = time.monotonic()
        for node, (due, pause) in self._tries.items():
            if now > due and node not in self.ready and node not in self.launchers and self._start is not None:
                self._tries[node] = now + pause, min(2 * pause, LONGEST_PAUSE_S)
                with contextlib.suppress(OSError):
                    plan = on_one_host(self.plan, node, os.environ)
                    self.launchers[node] = self._start(plan, {VARIABLE: f"{contact} {node}"})

    def notice(self, ended: Collection[int]) -> None:
        """Forget the launchers whose process IDs are in ``ended``."""
        self.launchers = {node: each for node, each in self.launchers.items() if each.pid not in ended}

    def successor(self) -> subprocess.Popen[bytes] | None:
        """Return, and forget, a launcher that can take the place of the first one, which has ended."""
        node = next((node for node in self.launchers if node in self.ready), None)
        return None if node is None else self.launchers.pop(node)


def own_address(plan: LaunchPlan) -> str:
    """Return the address at which the guardians reach this process."""
    first, guarded = plan.hosts[0], nodes_of(plan)
    if len(guarded) == 1 and (plan.job.is_local or short(first) == short(socket.gethostname())):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((plan.env["MASTER_ADDR"] if len(plan.hosts) > 1 else guarded[-1], 9))  # sends nothing
        return str(probe.getsockname()[0])
