"""``launch --elastic``: what ``launch`` tells the guardians of the nodes, and what it does when one or a rank dies.

A generation is all ranks, from their start until they have ended. When a rank is killed, the guardians kill the others
and start the next generation, which resumes the run. Everything else ends the launch as it would without guardians: a
rank's failure is written to the folder in which ``Supervisor`` looks for the reports of ``rank_env.sh``. After the loss
of a node, the next generation runs on a spare one; when a node is back, it becomes a spare one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wordrun.common import ends
from wordrun.common.errors import REQUEUE
from wordrun.common.listener import Listener, UnfitError, is_secret
from wordrun.launch.elastic.nodes import Nodes, own_address
from wordrun.launch.elastic.wire import Link, check, message_in
from wordrun.launch.job import short
from wordrun.launch.kills import Kills, Outcome
from wordrun.launch.launchers.base import find_command, own_bin
from wordrun.launch.output import Output
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.record import Record

# A rank that fails because another one was killed may be reported first; the other report follows within this time [s].
FIRST_CAUSE_S = 0.5
# A guardian that takes no messages for this long [s] is gone.
SEND_S = 5.0
AWAITED = {"meeting": "ready", "starting": "started", "ending": "ended"}
"""The answer that all guardians have to give before the next state, by state."""


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
    """meeting: guardians are not ready; starting, running, ending: what a generation does; leaving: the end."""
    lost: str = ""
    """The lost guardian without which the launch cannot continue, as named in messages."""
    succeeded: bool = False
    """All ranks have succeeded, whatever the launcher says about guardians that were lost."""
    uses_mpi: bool = False
    """A rank has called MPI, for which only a launcher can start ranks."""
    memory: str = ""
    """The evidence that memory ran out on a node."""
    stopping: bool = False
    """The launch is ending: no new generation starts, however the ranks end."""
    pids: dict[int, int] = field(default_factory=dict)
    """The process IDs of this generation, by rank."""
    nodes: Nodes = field(init=False)
    _links: dict[int, Link] = field(default_factory=dict)
    _hosts: dict[int, str] = field(default_factory=dict)
    _living: set[int] = field(default_factory=set)
    _failures: list[dict[str, Any]] = field(default_factory=list)
    """Failures that another rank's death may have caused, in order."""
    _decide_at: float = float("inf")

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.plan)
        self._answers = Answers(self.nodes.count)
        self._secret, address = secrets.token_hex(16), own_address(self.plan)
        self._listener = Listener(address, self.output.selector, self._admit)
        self.contact = f"{address} {self._listener.port} {self._secret}"
        """What a guardian needs to know."""

    def signal(self, number: int) -> bool:
        """Send a signal to every rank; return False if no guardian can do so yet."""
        for link in self._links.values():
            link.send(do="signal", number=number)
        return bool(self._links) and self.state != "meeting"

    def look(self) -> None:
        """Act on deadlines that have passed."""
        self._listener.look()
        now = time.monotonic()
        if now > self._decide_at and not self.stopping and self.nodes.port_taken(self.output.tail.lines()):
            self.say(f"port {self.nodes.port} was taken in the meantime: restarting the ranks with another port")
            self._end()
        elif now > self._decide_at:
            self._give_up()
        if late := self._answers.late(self._links):
            node, limit_s = late
            done = "answered" if node in self._links else "connected"
            self._lose(node, f"has not {done} for {limit_s:g} seconds")
        if self.state == "running" and not self.stopping:
            self.nodes.bring_back(self.contact)

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
        hosts = [self._hosts.get(node) for node, ranks in enumerate(self.nodes.layout) for _ in range(ranks)]
        return [pid for rank, pid in self.pids.items() if hosts[rank] == here]

    def close(self) -> None:
        """Close all connections, which makes the guardians kill their ranks."""
        self.state = "leaving"
        self._listener.close()
        for node in list(self._links):
            self._drop(node)

    def finish(self) -> None:
        """Note whether a guardian was lost before the ranks had ended, and close: the launcher has ended."""
        if not self.lost and self.state != "leaving" and self._hosts and not self.stopping:
            absent = [node for node in range(self.nodes.count) if node not in self._hosts]
            self.lost = self._named(next(iter(absent or self._links), 0))
            self.say(f"{self.lost} has ended")
        self.close()

    def _named(self, node: int) -> str:
        host = self._hosts.get(node, self.plan.job.hosts[node])
        several = [*self._hosts.values()].count(host) > 1  # a list of hosts may name one of them twice
        return f"the guardian on {host}" + f" (node {node})" * several

    def _admit(self, connection: socket.socket, line: bytes) -> None:
        """Tell a guardian what it will run."""
        hello = message_in(line)
        node, host = hello.get("node"), hello.get("host")
        if not (is_secret(hello.get("secret"), self._secret) and type(node) is int and isinstance(host, str)):
            raise UnfitError
        if node in self._links or node not in range(self.nodes.count):
            raise UnfitError
        connection.settimeout(SEND_S)
        link = Link(connection)
        self._links[node], self._hosts[node] = link, short(host)
        self.output.selector.register(link.socket, selectors.EVENT_READ, partial(self._hear, node))
        if self.stopping:
            link.send(do="leave")
        else:
            link.send(do="setup", **setup(self.plan, self.output.pipes), folder=self.status_dir)

    def _hear(self, node: int) -> None:
        """Act on what a guardian says."""
        link = self._links.get(node)
        if link is None:
            return  # another guardian has been lost at the same moment, and all connections are closed
        try:
            messages = link.receive()
            for message in messages or ():
                check(message, self.plan.ranks.np)
        except UnfitError as error:
            self._lose(node, f"has sent {error}")
            return
        if messages is None:
            if self.state != "leaving":
                self._lose(node, "has ended")
            else:
                self._drop(node)
            return
        for message in messages:
            if message["event"] == "exit":
                self._exited(node, message)
                continue
            if "port" in message:
                self.nodes.ports[node] = message["port"]
            if message["event"] == "ready":
                self.nodes.ready.add(node)
                if self.state == "meeting":
                    self._answers.wait_for_ready()
            if message["event"] != AWAITED.get(self.state) or node not in self._answers.asked:
                continue  # the answer to what was asked before
            if (answers := self._answers.add(node, message)) is not None:
                self._proceed(answers)

    def _proceed(self, answers: dict[int, Any]) -> None:
        """Enter the next state: all nodes have done what they were told to."""
        if self.stopping or self.uses_mpi:
            self._leave()
        elif self.state == "starting":
            self._started(answers)
        else:
            self._start()

    def _tell(self, **message: Any) -> None:
        """Tell the guardians that are ready what to do next."""
        self._answers.ask(self.nodes.ready)
        for node in sorted(self._answers.asked):
            self._links[node].send(**message)

    def _start(self) -> None:
        """Start a generation."""
        self.generation += 1
        self.nodes.arrange()
        layout, env = self.nodes.layout, self.nodes.variables()
        self.state = "starting"
        self._living, self._failures = {*range(sum(layout))}, []
        port = self.nodes.choose_port(first=not self.generation)
        env["WORDRUN_STATUS_DIR"] = self.status_dir
        ends.forget(self.status_dir)
        if self.generation:
            env["WORDRUN_RESUME"] = "auto"
        if self.kills.faults:
            env["WORDRUN_FAULTS"] = json.dumps(self.kills.faults)
        self._tell(do="start", generation=self.generation, port=port, env=env, layout=layout)

    def _started(self, answers: dict[int, Any]) -> None:
        self.pids = {int(rank): pid for answer in answers.values() for rank, pid in answer["pids"].items()}
        self.state = "running"
        if self.record is not None:  # before a rank can move it
            with contextlib.suppress(OSError):
                self.record.note(pids=[self.pids[rank] for rank in sorted(self.pids)])
        for node in self._answers.asked:
            self._links[node].send(do="go")

    def _exited(self, node: int, report: dict[str, Any]) -> None:
        if self.state not in ("starting", "running"):
            return  # its guardian has killed it
        rank, status = report["rank"], report["status"]
        self._living.discard(rank)
        if report.get("mpi"):
            self.uses_mpi = True
            self._end()
            return
        stopped = bool(report.get("stopped"))
        outcome = Outcome(status, rank, report.get("memory", ""), pid=report["pid"], at=time.time(), stopped=stopped)
        if failed := bool(status or report.get("unfinished")):
            self._failures.append({**report, "host": self._hosts[node]})
        else:
            ends.add(self.status_dir, rank, self._hosts[node])
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
        elif failed:
            self._decide_at = min(self._decide_at, time.monotonic() + FIRST_CAUSE_S)
        elif not self._living and not self._failures:
            self._leave(succeeded=True)

    def _end(self) -> None:
        """End the generation: have its ranks killed."""
        self.state, self._failures, self._decide_at = "ending", [], float("inf")
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

    def _leave(self, *, succeeded: bool = False) -> None:
        """Let the guardians exit, and the launcher with them."""
        self.state, self.succeeded = "leaving", succeeded
        self._answers.stop_waiting()
        for link in list(self._links.values()):
            link.send(do="leave")

    def _drop(self, node: int) -> None:
        link = self._links.pop(node)
        self.output.selector.unregister(link.socket)
        link.close()

    def _lose(self, node: int, how: str) -> None:
        """Continue without a guardian; if that is impossible, give up the others, so that all nodes are relaunched."""
        name, had_ranks = self._named(node), self.nodes.layout[node] > 0
        if node in self._links:
            self._drop(node)
        if self.state != "meeting":
            self.nodes.lose(node)
            self.output.hush()
        if self._continues_without(name, how, had_ranks):
            return
        if not self.stopping:
            self.lost = name
        self.say(f"{name} {how}")
        self._decide_at = float("inf")
        self._answers.stop_waiting()
        self.output.hush()
        self.close()

    def _continues_without(self, name: str, how: str, had_ranks: bool) -> bool:
        """After the loss of the guardian ``name``, restart the ranks elsewhere, or let them run if it had none."""
        best = self.nodes.best() if self.state not in ("meeting", "leaving") else None
        if best is None or self.stopping:
            return False
        if had_ranks or self.state != "running":
            if not self.kills.left:
                return False
            outcome = Outcome(1, lost=name, at=time.time())
            if self.kills.fault(outcome, self.plan.env["WORDRUN_LAUNCH_RECORD"]) is None:
                return False
            self.kills.start_again()
            self.nodes.arrange()
            self.say(f"{name} {how}: restarting {self.nodes.named()}")
            self._end()
        else:
            self.say(f"{name} {how}; it had no ranks")
        return True


# A guardian that has not done what it was told to, such as kill its ranks, within this time [s] counts as lost.
ANSWER_S = 60.0
# Before they are ready, they import what the ranks need, for at most this long [s] after the first one is ready. They
# connect before that, so one that has not connected after ANSWER_S has died: not every launcher says so.
READY_S = 300.0


class Answers:
    """The answers of the nodes that were asked; the first question is whether all of them are ready.

    Args:
        nodes: the number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self.asked = {*range(nodes)}
        self._given: dict[int, Any] = {}
        self._since = self._limit_s = float("inf")

    def ask(self, nodes: Iterable[int]) -> None:
        """Expect an answer of each of ``nodes``, and forget the last ones."""
        self.asked, self._given = {*nodes}, {}
        self._since, self._limit_s = time.monotonic(), ANSWER_S

    def wait_for_ready(self) -> None:
        """Begin to wait for nodes that are not ready, unless that has begun."""
        self._since, self._limit_s = min(self._since, time.monotonic()), READY_S

    def stop_waiting(self) -> None:
        """Consider no answer late from now on."""
        self._since = self._limit_s = float("inf")

    def add(self, node: int, answer: Any) -> dict[int, Any] | None:
        """Keep the answer of a node, and return all of them if it is the last one to arrive."""
        self._given[node] = answer
        if not self.asked <= {*self._given}:
            return None
        found, self._given = self._given, {}
        self.stop_waiting()
        return found

    def late(self, connected: Collection[int]) -> tuple[int, float] | None:
        """Return a node whose answer is late, and how long it was waited for [s]; None: there is none."""
        waited = time.monotonic() - self._since
        for node in sorted(self.asked - {*self._given}):
            limit_s = self._limit_s if node in connected else min(self._limit_s, ANSWER_S)
            if waited > limit_s:
                return node, limit_s
        return None


def setup(plan: LaunchPlan, pipes: str) -> dict[str, Any]:
    """Return what guardians need to know to start ranks; ``pipes`` is the folder of the ranks' own pipes."""
    command, fork = python_command(plan)
    return {
        "command": command,
        "fork": fork,
        "imports": fork and not plan.options.no_preimport,
        "pipes": pipes,
        "wordrun": plan.options.runs_wordrun,
        "restarts": plan.options.retries,
        "bind": not plan.job.is_local,
    }


def python_command(plan: LaunchPlan) -> tuple[list[str], bool]:
    """Return what a forked rank runs, and True; for a command that no fork can run, the command, and False.

    That is a Python script, or a module, of the interpreter that runs ``launch``. Under --hang, a new
    interpreter has to start, because its sitecustomize watches the collectives.
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
