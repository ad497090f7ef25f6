"""``launch --elastic``: what ``launch`` tells the guardians of the nodes, and what it does when one or a rank dies.

A generation is all ranks, from their start until they have ended. When a rank is killed, the guardians kill the others
and start the next generation, which resumes the run. Everything else ends the launch as without guardians: a rank's
failure is written to the folder in which ``Supervisor`` looks for the reports of ``rank_env.sh``.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wordrun.errors import REQUEUE
from wordrun.launch.job import short
from wordrun.launch.kills import Kills, Outcome
from wordrun.launch.launchers.base import find_command, own_bin
from wordrun.launch.output import Output
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.record import Record
from wordrun.launch.wire import Link

# A rank that fails because another one was killed may be reported first; the other report follows within this time [s].
FIRST_CAUSE_S = 0.5
# A guardian that has not killed its ranks after this long [s] counts as lost.
ANSWER_S = 60.0
AWAITED = {"meeting": "ready", "starting": "started", "ending": "ended"}
"""What all guardians say before the next state."""


@dataclass
class Guardians:
    """The guardians of a launch, one for each node."""

    plan: LaunchPlan
    kills: Kills
    output: Output
    status_dir: str
    record: Record | None
    say: Callable[[str], None]
    generation: int = -1
    """The number of the last generation that was started."""
    state: str = "meeting"
    """meeting: not all guardians are ready; starting, running, ending: a generation is; leaving: the end."""
    lost: str = ""
    """The guardian that was lost, for people to read."""
    uses_mpi: bool = False
    """A rank has called MPI, for which only a launcher can start ranks."""
    memory: str = ""
    """The evidence that memory ran out on a node."""
    stopping: bool = False
    """The launch ends, however the ranks end."""
    pids: dict[int, int] = field(default_factory=dict)
    """The process IDs of this generation, by rank."""
    _links: dict[int, Link] = field(default_factory=dict)
    _hosts: dict[int, str] = field(default_factory=dict)
    _done: dict[int, Any] = field(default_factory=dict)
    """The nodes that have done what they were last told to, with their answers."""
    _living: set[int] = field(default_factory=set)
    _failures: list[dict[str, Any]] = field(default_factory=list)
    """Failures that may be the consequence of another rank's death, in order."""
    _decide_at: float = float("inf")
    _answer_by: float = float("inf")

    def __post_init__(self) -> None:
        self._secret = secrets.token_hex(16)
        self._server = socket.create_server((_own_address(self.plan), 0), backlog=len(self.plan.hosts))
        self._server.setblocking(False)
        self.output.selector.register(self._server, selectors.EVENT_READ, self._accept)
        address, port = self._server.getsockname()
        self.contact = f"{address} {port} {self._secret}"
        """What a guardian needs to know."""

    def signal(self, number: int) -> bool:
        """Send a signal to every rank; return False if no guardian can do so yet."""
        for link in self._links.values():
            link.send(do="signal", number=number)
        return bool(self._links) and self.state != "meeting"

    def look(self) -> None:
        """Act on what has waited long enough."""
        now = time.monotonic()
        if now > self._decide_at:
            self._give_up()
        if now > self._answer_by:
            node = next(node for node in range(len(self.plan.hosts)) if node not in self._done)
            self._lose(node, f"has not answered for {ANSWER_S:g} seconds")

    def stop(self) -> None:
        """Start no more generations: the launch is being stopped."""
        self.stopping = True
        if self.state != "running":
            self._leave()
        elif self._failures:
            self._give_up()

    def known(self) -> dict[int, int]:
        """Return the process IDs of this generation, by rank."""
        return dict(self.pids)

    def ranks_here(self) -> list[int]:
        """Return the process IDs of the ranks on this host."""
        here = short(socket.gethostname())
        hosts = [self._hosts.get(node) for node, ranks in enumerate(self.plan.ranks.layout) for _ in range(ranks)]
        return [pid for rank, pid in self.pids.items() if hosts[rank] == here]

    def close(self) -> None:
        """Close all connections, which makes the guardians kill their ranks."""
        self.state = "leaving"
        for connection in (self._server, *(link.socket for link in self._links.values())):
            with contextlib.suppress(KeyError, ValueError):
                self.output.selector.unregister(connection)
            connection.close()
        self._links.clear()

    def finish(self) -> None:
        """Note whether a guardian was lost before the ranks had ended, and close: the launcher has ended."""
        if not self.lost and self.state != "leaving" and self.generation >= 0 and not self.stopping:
            self.lost = self._named(next(iter(self._links), 0))
            self.say(f"{self.lost} has ended")
        self.close()

    def _named(self, node: int) -> str:
        return f"the guardian on {self._hosts.get(node, self.plan.hosts[node])}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.settimeout(5)
            link = Link(connection)
            self.output.selector.register(connection, selectors.EVENT_READ, partial(self._greet, link))

    def _greet(self, link: Link) -> None:
        """Admit a guardian that knows the secret."""
        messages = link.receive()
        if messages == []:
            return
        self.output.selector.unregister(link.socket)
        hello = messages[0] if messages else {}
        node: Any = hello.get("node")
        if not hmac.compare_digest(str(hello.get("secret")), self._secret) or node not in range(len(self.plan.hosts)):
            link.close()
            return
        self._links[node], self._hosts[node] = link, short(str(hello["host"]))
        self.output.selector.register(link.socket, selectors.EVENT_READ, partial(self._hear, node))
        if self.stopping:
            link.send(do="leave")
            return
        command, fork = python_command(self.plan)
        pipes = self.output.pipes
        link.send(
            do="setup", command=command, fork=fork, imports=fork and not self.plan.options.no_preimport, pipes=pipes,
            layout=self.plan.ranks.layout, restarts=self.plan.options.retries, bind=not self.plan.job.is_local,
        )  # fmt: skip

    def _hear(self, node: int) -> None:
        """Act on what a guardian says."""
        link = self._links.get(node)
        if link is None:
            return  # another guardian has been lost at the same moment, and all connections are closed
        messages = link.receive()
        if messages is None:
            self.output.selector.unregister(link.socket)
            self._links.pop(node).close()
            if self.state != "leaving":
                self._lose(node, "has ended")
            return
        for message in messages:
            if message["event"] == "exit":
                self._exited(node, message)
                continue
            if message["event"] != AWAITED.get(self.state):
                continue  # the answer to what was asked before
            self._done[node] = message.get("pids") or message.get("port")
            if len(self._done) == len(self.plan.hosts):
                answers, self._done, self._answer_by = self._done, {}, float("inf")
                if self.stopping or self.uses_mpi:
                    self._leave()
                elif message["event"] == "started":
                    self._started(answers)
                else:
                    self._start(answers[0])

    def _tell(self, **message: Any) -> None:
        for link in list(self._links.values()):
            link.send(**message)

    def _start(self, port: int) -> None:
        """Start a generation, whose ranks meet at a ``port`` that is free on the first node."""
        self.generation += 1
        self.state, env = "starting", {}
        self._living, self._failures = {*range(self.plan.ranks.np)}, []
        if self.generation:
            env["WORDRUN_RESUME"] = "auto"
        else:
            port = int(self.plan.env["MASTER_PORT"])
        if self.kills.faults:
            env["WORDRUN_FAULTS"] = json.dumps(self.kills.faults)
        self._answer_by = time.monotonic() + ANSWER_S
        self._tell(do="start", generation=self.generation, port=port, env=env)

    def _started(self, answers: dict[int, Any]) -> None:
        self.pids = {int(rank): pid for pids in answers.values() for rank, pid in pids.items()}
        self.state = "running"
        if self.record is not None:  # before a rank can move it
            with contextlib.suppress(OSError):
                self.record.note(pids=[self.pids[rank] for rank in sorted(self.pids)])
        self._tell(do="go")

    def _exited(self, node: int, report: dict[str, Any]) -> None:
        if self.state not in ("starting", "running"):
            return  # it was killed by its guardian
        rank, status = report["rank"], report["status"]
        self._living.discard(rank)
        if report.get("mpi"):
            self.uses_mpi = True
            self._end()
            return
        outcome = Outcome(status, rank, report.get("memory", ""), pid=report["pid"], at=time.time())
        if status:
            self._failures.append({**report, "host": self._hosts[node]})
        if outcome.killed and not self.stopping:
            self.memory = outcome.memory
            fault = self.kills.fault(outcome, self.plan.env["WORDRUN_LAUNCH_RECORD"]) if self.kills.left else None
            if fault is not None:
                self.kills.start_again()
                self.say(f"{fault.meaning} ({fault.line}): restarting the ranks")
                self._end()
                return
            self._failures.insert(0, self._failures.pop())  # the first cause
        if self.stopping or outcome.killed or status == REQUEUE:
            self._give_up()
        elif status:
            self._decide_at = min(self._decide_at, time.monotonic() + FIRST_CAUSE_S)
        elif not self._living and not self._failures:
            self._leave()

    def _end(self) -> None:
        """End the generation: have all its ranks killed."""
        self.state, self._done, self._failures, self._decide_at = "ending", {}, [], float("inf")
        self._answer_by = time.monotonic() + ANSWER_S
        self._tell(do="end")

    def _give_up(self) -> None:
        """Report the failures, in order; ``Supervisor`` ends the launch."""
        self._decide_at = float("inf")
        self.stopping = True
        for report in self._failures:
            with contextlib.suppress(OSError), open(os.path.join(self.status_dir, str(report["rank"])), "w") as file:
                file.write(f"{report['status']} {report['host']}\n")
        self._failures = []
        if not self._living:
            self._leave()

    def _leave(self) -> None:
        """Let the guardians exit, and the launcher with them."""
        self.state = "leaving"
        self._tell(do="leave")

    def _lose(self, node: int, how: str) -> None:
        """Give up the guardians: without one, only the launcher can start ranks on its node."""
        if not self.stopping:
            self.lost = self._named(node)
        self.say(f"{self._named(node)} {how}")
        self._decide_at = self._answer_by = float("inf")
        self.output.hush()
        self.close()


def _own_address(plan: LaunchPlan) -> str:
    """Return the address at which the guardians reach this process."""
    first = plan.hosts[0]
    if len(plan.hosts) == 1 and (plan.job.is_local or short(first) == short(socket.gethostname())):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((plan.env["MASTER_ADDR"] if len(plan.hosts) > 1 else first, 9))  # sends nothing
        return str(probe.getsockname()[0])


def python_command(plan: LaunchPlan) -> tuple[list[str], bool]:
    """Return what a forked rank runs, and True; for a command that no fork can run, the command, and False.

    That is a Python script, or a module, of the interpreter that runs ``launch``. Under --hang, an interpreter has to
    start, since that is what watches the collectives.
    """
    command = list(plan.options.command)
    program, _ = find_command(command[0], plan.environment(os.environ).get("PATH", os.defpath))
    is_own = bool(program) and os.path.realpath(os.path.dirname(program)) == os.path.realpath(own_bin())
    if not is_own or plan.options.hang is not None:
        return command, False
    if re.fullmatch(r"python[\d.]*", os.path.basename(program)):
        words = command[2:] if command[1:2] == ["-u"] else command[1:]
        runs = words[:1] and (not words[0].startswith("-") or (words[0] == "-m" and len(words) > 1))
        return (words, True) if runs else (command, False)
    with contextlib.suppress(OSError), open(program, "rb") as file:
        first = file.readline(500).strip()
        if first.startswith(b"#!") and os.path.dirname(first[2:]) == os.fsencode(own_bin()):
            return [program, *command[1:]], True
    return command, False
