"""``launch --elastic``: how ``launch`` directs the guardians, and what it does when a guardian or a rank dies.

A guardian is a process on each node that forks the node's ranks, watches them and reports their ends.
A generation is all ranks, from their start until they have ended. When a rank is killed, the guardians kill the others
and start the next generation, which resumes the run. After the loss of a node, the next generation runs on a spare
node; a lost node that comes back becomes a spare node. Any other failure ends the launch, as without guardians:
guardians write reports of the ranks' ends for ``Supervisor``, into the same folder as ``rank_env.sh`` otherwise does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from wordrun.common import exit_reports, slurm
from wordrun.common.errors import REQUEUE
from wordrun.common.listener import UnfitError
from wordrun.launch.elastic.connections import VARIABLE, Connections, check
from wordrun.launch.elastic.nodes import Nodes, own_address
from wordrun.launch.elastic.starter import nodes_of, setup
from wordrun.launch.job import short
from wordrun.launch.launchers.base import STOPPING
from wordrun.launch.rank_control import RankControl, StartLauncher
from wordrun.launch.retries import Outcome
from wordrun.launch.schedulers import SCHEDULERS

# A rank that fails because another one was killed may be reported first; the other report follows within this time [s].
FIRST_CAUSE_S = 0.5
# A launcher that has lost a node may take this long [s] to end after the last guardian.
LATE_S = 10.0
AWAITED = {"meeting": "ready", "starting": "started", "ending": "ended"}
"""Maps each state to the answer that all guardians must give before the next state begins."""
LOST = "lost guardian"
"""The cause in run.json of a restart after the loss of a guardian."""


@dataclass
class Generation:
    """All ranks, from their start until they have ended."""

    number: int = -1
    """0 for the first one; -1: no generation was started."""
    living: set[int] = field(default_factory=set)
    pids: dict[int, int] = field(default_factory=dict)
    """The process IDs of the ranks by rank, once all nodes have started theirs."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Reports of failed ranks, in order, until it is known whether a killed rank has caused the failures."""
    decide_at: float = float("inf")
    """When to take the first failure for the cause, on the monotonic clock."""


@dataclass
class GuardianControl(RankControl):
    """Reaches the ranks through the guardians of their nodes, and restarts the ranks."""

    state: str = "meeting"
    """meeting: guardians are not ready; starting, running, ending: what a generation does; leaving: the end."""
    lost: str = ""
    """The lost guardian without which the launch cannot continue, as named in messages."""
    uses_mpi: bool = False
    """Whether a rank has called MPI, so that only a launcher can start the ranks."""
    stopping: bool = False
    """Whether the launch is ending, so that no new generation starts, however the ranks end."""
    generation: Generation = field(default_factory=Generation)

    def __post_init__(self) -> None:
        self.nodes, self._left_at = Nodes(self.plan), float("inf")
        self._answers = Answers(self.nodes.count)
        self.connections = Connections(
            own_address(self.plan), nodes_of(self.plan), self.output.selector, self._admitted, self._hear
        )

    def variables(self) -> dict[str, str]:
        """Return the variable that tells guardians how to connect."""
        return {VARIABLE: self.connections.contact}

    def begin(self, start: StartLauncher) -> None:
        """From now on, restart guardians on lost nodes."""
        self.nodes.begin(start)

    def pids(self) -> dict[int, int]:
        """Return the process IDs of this generation, by rank."""
        return dict(self.generation.pids)

    def ranks_here(self, launcher: int) -> list[int]:
        """Return the process IDs of the ranks on this host."""
        here = short(slurm.node_name(os.environ))
        hosts = [self.connections.hosts.get(node) for node, ranks in enumerate(self.nodes.layout) for _ in range(ranks)]
        return [pid for rank, pid in self.generation.pids.items() if hosts[rank] == here]

    def send(self, number: int, launcher: int) -> None:
        """Send a signal to every rank or, before guardians can do so, to the launcher."""
        if number == signal.SIGTERM and SCHEDULERS[self.plan.job.scheduler].is_ending(self.plan.job):
            return  # the scheduler has sent it to the ranks
        self.connections.send(self.connections.open, do="signal", number=number)
        if not self.connections.open or self.state == "meeting":
            super().send(signal.SIGTERM if number in STOPPING else number, launcher)

    def look(self) -> None:
        """Act on deadlines that have passed."""
        self.connections.look()
        late = time.monotonic() > self.generation.decide_at
        if late and not self.stopping and self.nodes.port_taken(self.output.tail.lines()):
            self.say(f"port {self.nodes.port} was taken in the meantime: restarting the ranks with another port")
            self._end()
        elif late:
            self._give_up()
        if overdue := self._answers.late(self.connections.open):
            node, limit_s = overdue
            done = "answered" if node in self.connections.open else "connected"
            self._lose(node, f"has not {done} for {limit_s:g} seconds")
        if self.state == "running" and not self.stopping:
            self.nodes.bring_back(self.connections.contact)

    def ended(self, pids: Collection[int]) -> None:
        """Forget those launchers that were started for lost nodes and have ended."""
        self.nodes.notice(pids)

    def next_launcher(self) -> subprocess.Popen[bytes] | None:
        """Return the launcher of a restarted guardian."""
        return self.nodes.successor()

    @property
    def has_launchers(self) -> bool:
        """Whether launchers of restarted guardians run."""
        return bool(self.nodes.launchers)

    @property
    def launcher_is_late(self) -> bool:
        """Whether it has not ended in time although a guardian was lost and the others have left: srun waits for it."""
        return self.succeeded and self.nodes.has_lost and time.monotonic() > self._left_at + LATE_S

    @property
    def knows_ends(self) -> bool:
        """Whether the launcher's exit status does not matter.

        This is so if guardians have reported the end of every rank, or if a relaunch will start the ranks anew.
        """
        return self.succeeded or self.uses_mpi

    def stop(self) -> None:
        """Start no more generations: the launch is being stopped."""
        self.stopping = True
        if self.state != "running":
            self._leave()
        elif self.generation.failures:
            self._give_up()

    def kill(self) -> None:
        """Close all connections, which makes the guardians kill their ranks."""
        self.state = "leaving"
        self.connections.close()

    def finish(self) -> None:
        """After the end of the launcher: note whether a guardian was lost before the ranks had ended, and close."""
        hosts = self.connections.hosts
        if not self.lost and self.state != "leaving" and hosts and not self.stopping:
            absent = [node for node in range(self.nodes.count) if node not in hosts]
            self.lost = self.connections.name(next(iter(absent or self.connections.open), 0))
            self.say(f"{self.lost} has ended")
        self.kill()

    def outcome(self, outcome: Outcome, *, reported: bool) -> Outcome:
        """Return ``outcome`` with the lost guardian, and whether the command calls MPI."""
        early = "a guardian" if outcome.killed and not reported else ""  # before it has connected
        lost = self.lost or early
        why = "COMMAND calls MPI, so only a launcher can start its ranks: relaunching without --elastic"
        return replace(outcome, lost=lost, cause=LOST if lost else "", needs_launcher=why if self.uses_mpi else "")

    def _admitted(self, node: int) -> None:
        """Tell a guardian that has connected what it will run."""
        if self.stopping:
            self.connections.send([node], do="leave")
        else:
            facts = setup(self.plan, self.output.pipes)
            self.connections.send([node], do="setup", **facts, folder=self.status_dir)

    def _hear(self, node: int) -> None:
        """Act on what a guardian says."""
        try:
            messages = self.connections.receive(node)
            for message in messages or ():
                check(message, self.plan.ranks.np)
        except UnfitError as error:
            self._lose(node, f"has sent {error}")
            return
        if messages is None:
            if self.state != "leaving":
                self._lose(node, "has ended")
            else:
                self.connections.drop(node)
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
                continue  # the answer to an earlier question
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
        """Tell the guardians that are ready what to do next, and expect their answers."""
        self._answers.ask(self.nodes.ready)
        self.connections.send(sorted(self._answers.asked), **message)

    def _start(self) -> None:
        """Start a generation."""
        self.nodes.arrange()
        layout, env = self.nodes.layout, self.nodes.variables()
        pids = self.generation.pids  # those of the last generation, until the new ones are known
        self.generation = Generation(self.generation.number + 1, {*range(sum(layout))}, pids)
        self.state = "starting"
        number = self.generation.number
        port = self.nodes.choose_port(first=not number)
        env["WORDRUN_STATUS_DIR"] = self.status_dir
        exit_reports.forget(self.status_dir)
        if number:
            env["WORDRUN_RESUME"] = "auto"
        if self.retries.faults:
            env["WORDRUN_FAULTS"] = json.dumps(self.retries.faults)
        self._tell(do="start", generation=number, port=port, env=env, layout=layout)

    def _started(self, answers: dict[int, Any]) -> None:
        """Let the ranks go: all nodes have started theirs."""
        self.generation.pids = {int(rank): pid for answer in answers.values() for rank, pid in answer["pids"].items()}
        self.state = "running"
        if self.record is not None:  # before a rank can move it
            with contextlib.suppress(OSError):
                self.record.note(pids=[pid for _, pid in sorted(self.generation.pids.items())])
        self.connections.send(self._answers.asked, do="go")

    def _exited(self, node: int, report: dict[str, Any]) -> None:
        """Act on the end of a rank: restart all ranks, report failures, or leave after the last success."""
        if self.state not in ("starting", "running"):
            return  # its guardian has killed it
        rank, status, generation = report["rank"], report["status"], self.generation
        generation.living.discard(rank)
        if report.get("mpi"):
            self.uses_mpi = True
            self._end()
            return
        cause = "SIGSTOP" if report.get("stopped") else ""
        outcome = Outcome(status, rank, report.get("memory", ""), cause=cause, pid=report["pid"], at=time.time())
        host = self.connections.hosts[node]
        if failed := bool(status or report.get("unfinished")):
            generation.failures.append({**report, "host": host})
        else:
            exit_reports.add(self.status_dir, rank, host)
        if outcome.killed and not self.stopping:
            self.memory = outcome.memory
            if self._restarts_after(outcome):
                return
            generation.failures.insert(0, generation.failures.pop())  # the first cause
        if self.stopping or outcome.killed or status == REQUEUE:
            self._give_up()
        elif failed:
            generation.decide_at = min(generation.decide_at, time.monotonic() + FIRST_CAUSE_S)
        elif not generation.living and not generation.failures:
            self._leave(succeeded=True)

    def _restarts_after(self, outcome: Outcome) -> bool:
        """Restart the ranks after one was killed, and return True; False: it would not help, or no restart is left."""
        if not self.retries.left:
            return False
        fault = self.retries.after_kill(outcome, self.plan.env["WORDRUN_LAUNCH_RECORD"])
        if fault is None:
            return False
        self.retries.use_one()
        self.say(f"{fault.meaning} ({fault.line}): restarting the ranks")
        self._end()
        return True

    def _end(self) -> None:
        """End the generation: have its ranks killed."""
        self.state, self.generation.failures, self.generation.decide_at = "ending", [], float("inf")
        self._tell(do="end")

    def _give_up(self) -> None:
        """Report the failures, in order; ``Supervisor`` ends the launch."""
        self.stopping = True
        for report in self.generation.failures:
            with contextlib.suppress(OSError), open(os.path.join(self.status_dir, str(report["rank"])), "w") as file:
                file.write(f"{report['status']} {report['host']}\n")
        self.generation.failures, self.generation.decide_at = [], float("inf")
        if not self.generation.living:
            self._leave()

    def _leave(self, *, succeeded: bool = False) -> None:
        """Let the guardians exit, and the launcher with them."""
        self.state, self.succeeded, self._left_at = "leaving", succeeded, time.monotonic()
        self._answers.stop_waiting()
        self.connections.send(list(self.connections.open), do="leave")

    def _lose(self, node: int, how: str) -> None:
        """Continue without a guardian; if that is impossible, give up the others, so that all nodes are relaunched."""
        name, had_ranks = self.connections.name(node), self.nodes.layout[node] > 0
        self.connections.drop(node)
        if self.state != "meeting":
            self.nodes.lose(node)
            self.output.hush()
        if self._continues_without(name, how, had_ranks):
            return
        if not self.stopping:
            self.lost = name
        self.say(f"{name} {how}")
        self.generation.decide_at = float("inf")
        self._answers.stop_waiting()
        self.output.hush()
        self.kill()

    def _continues_without(self, name: str, how: str, had_ranks: bool) -> bool:
        """After the loss of the guardian ``name``, restart the ranks elsewhere, or let them run if it had none."""
        best = self.nodes.best() if self.state not in ("meeting", "leaving") else None
        if best is None or self.stopping:
            return False
        if had_ranks or self.state != "running":
            outcome = Outcome(1, lost=name, cause=LOST, at=time.time())
            if not self.retries.left:
                return False
            if self.retries.after_kill(outcome, self.plan.env["WORDRUN_LAUNCH_RECORD"]) is None:
                return False
            self.retries.use_one()
            self.nodes.arrange()
            self.say(f"{name} {how}: restarting {self.nodes.named()}")
            self._end()
        else:
            self.say(f"{name} {how}; it had no ranks")
        return True


# A guardian that has not done what it was told to, such as kill its ranks, within this time [s] counts as lost.
ANSWER_S = 60.0
# A guardian connects, and then imports what the ranks need; the slowest may be ready this long [s] after the first one.
# A guardian that has not connected after ANSWER_S has died; not every launcher reports this.
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
