"""Turns the ranks' answers into one message: which ranks have not reached which collective, and where each rank is."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wordrun.common.errors import ranges
from wordrun.dist.hang import flight_recorder, stacks
from wordrun.dist.mesh import AXES, Layout
from wordrun.dist.world import World

# A message names this many groups of ranks, and each this many hosts; the report has all of them.
GROUPS, SHOWN = 6, 8
MOST = 20
"""Number of collectives that an answer describes."""
UNKNOWN = Layout()


@dataclass
class Answer:
    """Where a rank is."""

    rank: int
    host: str
    pid: int
    phase: str = ""
    """What the main thread does, according to the trainer; empty: unknown."""
    step: int | None = None
    """Optimizer steps so far."""
    idle_s: float = 0.0
    """Seconds since the main thread's last sign of progress."""
    stacks: Mapping[str, Any] = field(default_factory=dict)
    """The calls of each thread."""
    line: str = ""
    """The innermost line of the user's code."""
    state: str = ""
    """The state of a process that cannot answer, such as stopped, if the operating system shows it."""
    spoken_for: bool = False
    """Whether another rank on its host answers for it."""
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """The ranks of each process group, as ranges of first rank, last rank and stride; empty: all ranks."""
    call: str = ""
    """The function of torch.distributed that the main thread is in."""
    pending: Sequence[Mapping[str, Any]] = ()
    """The collectives that it waits for: group, number in the group (seq), operation (op) and size."""
    last: Mapping[str, int] = field(default_factory=dict)
    """The sequence number of its last collective in each group."""
    recent: Sequence[Mapping[str, Any]] = ()
    """Its last collectives, also those that have ended, described as ``pending``."""

    def waits_for(self, group: str) -> Mapping[str, Any] | None:
        """Return the first collective of ``group`` that it waits for."""
        return min((each for each in self.pending if each["group"] == group), key=lambda e: e["seq"], default=None)

    def location(self, blocked: str) -> str:
        """Return what the rank does, to follow "is" or "are" in a message about a collective of group ``blocked``."""
        if self.state:
            return f"{self.state}{f' at {self.line}' if self.line else ''}"
        if self.spoken_for:
            return f"at {self.line}, where its interpreter is blocked" if self.line else "silent"
        doing = f" ({self.phase}{'' if self.step is None else f' after {self.step} steps'})" if self.phase else ""
        others = [] if self.waits_for(blocked) else sorted({each["group"] for each in self.pending})
        calls = [f"{call['op']} of {call['size']}" for group in others[:1] if (call := self.waits_for(group))]
        another = " of another group" if blocked else ""
        return f"at {self.line}{doing}{f', waiting in {calls[0]}{another}' if calls else ''}"


def collectives(size: int) -> dict[str, Any]:
    """Return the fields of an ``Answer`` about collectives, of a rank of ``size``: groups, pending, last, recent."""
    records = flight_recorder.flight_records() if is_joined() else []
    last: dict[str, int] = {}
    for record in records:
        last[record["group"]] = max(last.get(record["group"], 0), record["seq"])
    members = flight_recorder.group_members() if records else {}
    named = [({name: record[name] for name in ("group", "seq", "op", "size")}, record["pending"]) for record in records]
    return {
        "groups": {group: spans(members[group], size) for group in last if group in members},
        "last": last,
        "pending": [call for call, pending in named if pending][:MOST],
        "recent": [call for call, _ in named[-MOST:]],
    }


def spans(members: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return ``members`` as ranges of first rank, last rank and stride, usually one; empty: all of ``size`` ranks."""
    if len(members) == size:
        return []
    distance = members[1] - members[0] if members[1:] else 1
    if [*range(members[0], members[-1] + 1, distance)] == list(members):
        return [(members[0], members[-1], distance)]
    return [(member, member, 1) for member in members]


def is_joined() -> bool:
    """Return whether this process has a torch process group, without importing torch."""
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


@dataclass(frozen=True)
class Blocked:
    """A collective that some ranks wait for."""

    group: str
    seq: int
    waiting: frozenset[int]
    missing: frozenset[int]
    """Members of the group that have not reached it."""
    calls: Mapping[tuple[str, str], Sequence[int]]
    """The ranks that have reached it, as far as is known, by operation and size; several if they disagree."""
    members: Sequence[int]
    """The ranks of the group."""


def describe(
    answers: Sequence[Answer],
    world: World,
    layout: Layout = UNKNOWN,
    ended: Collection[int] = (),
    *,
    hangs: bool = True,
) -> str:
    """Return one paragraph about the ``answers`` of the ranks: who waits for whom, and the line of each group of ranks.

    Args:
        answers: the answers of ranks, their own or given by others for them, by rank.
        world: a rank of the job.
        layout: the layout of the job's ranks; the message names coordinates in it.
        ended: the ranks that have ended with status 0, as far as is known.
        hangs: whether the job makes no progress; False: the ranks were asked while they work.
    """
    by_rank = {answer.rank: answer for answer in answers}
    gone = [rank for rank in range(world.size) if rank in ended and rank not in by_rank]
    silent = [rank for rank in range(world.size) if rank not in by_rank and rank not in ended]
    sentences = []
    if gone:
        have, whom = ("have", "them") if gone[1:] else ("has", "it")
        waits = next((answer.line for answer in answers if (answer.call or answer.pending) and answer.line), "")
        wait = f"; others wait for {whom} at {waits}" if hangs and waits else ""
        sentences.append(f"{names(gone, hosts_of(gone, by_rank, world), layout)} {have} ended with status 0{wait}")
    if blocked := culprit(answers, world.size):
        sentences.append(_who_waits(blocked, layout, hangs))
    elif (waiting := [answer.rank for answer in answers if answer.call]) and len(waiting) < len(answers):
        others = [rank for rank in by_rank if rank not in waiting]
        calls = " and ".join(sorted({answer.call for answer in answers if answer.call}))
        sentences.append(f"{names(waiting)} {'wait' if waiting[1:] else 'waits'} in {calls} for {names(others)}")
    if silent:
        are = "is" if len(silent) == 1 else "are"
        sentences.append(f"{names(silent, hosts_of(silent, by_rank, world), layout)} {are} silent")
    first = blocked.missing if blocked else frozenset[int]()
    locations: dict[tuple[bool, str], list[int]] = {}
    for answer in answers:
        location = answer.location(blocked.group if blocked else "")
        locations.setdefault((answer.rank not in first, location), []).append(answer.rank)
    ordered = sorted(locations.items(), key=lambda item: (item[0][0], len(item[1])))
    for (_, location), ranks in ordered[:GROUPS]:
        are = "is" if len(ranks) == 1 else "are"
        sentences.append(f"{names(ranks, hosts_of(ranks, by_rank, world), layout)} {are} {location}")
    if len(ordered) > GROUPS:
        sentences.append(f"the other ranks are at {len(ordered) - GROUPS} other lines")
    return "; ".join(sentences)


def culprit(answers: Sequence[Answer], size: int) -> Blocked | None:
    """Return the collective that explains the hang best; None: no rank waits for a collective.

    Preferred is one that lacks ranks which do not wait for a collective themselves, then one in which the ranks have
    called different operations.
    """
    groups = sorted({each["group"] for answer in answers for each in answer.pending} - {"p2p"})
    found = [_blocked(group, answers, size) for group in groups]
    free = set(range(size)) - {answer.rank for answer in answers if answer.pending}

    def weight(blocked: Blocked) -> tuple[bool, bool, bool, int]:
        missing = blocked.missing
        return bool(missing and missing <= free), bool(missing & free), len(blocked.calls) > 1, len(blocked.waiting)

    return max(found, key=weight, default=None)


def _blocked(group: str, answers: Sequence[Answer], size: int) -> Blocked:
    waits = {answer.rank: call for answer in answers if (call := answer.waits_for(group))}
    seq = min(call["seq"] for call in waits.values())
    spans = next((answer.groups[group] for answer in answers if answer.groups.get(group)), [(0, size - 1, 1)])
    members = [rank for first, last, distance in spans for rank in range(first, last + 1, distance)]
    reached = {each.rank for each in answers if each.last.get(group, 0) >= seq}
    calls: dict[tuple[str, str], list[int]] = {}
    for answer in answers:
        for call in (*answer.pending, *answer.recent):
            if (call["group"], call["seq"]) == (group, seq):
                calls.setdefault((call["op"], call["size"]), []).append(answer.rank)
                break
    waiting = frozenset(rank for rank, call in waits.items() if call["seq"] == seq)
    return Blocked(group, seq, waiting, frozenset({*members} - reached), calls, members)


def _who_waits(blocked: Blocked, layout: Layout, hangs: bool) -> str:
    """Return who has not reached a collective, or how the ranks disagree about it."""
    of, first = f"of {len(blocked.members)} ranks", blocked.members[0]
    if blocked.group != "0":
        along = [f" along {axis}" for axis in AXES if [*layout.group(first, axis)] == [*blocked.members]]
        of += along[0] if along else f" in group {blocked.group}"
    calls = [
        (f"{op} number {blocked.seq}{f' of {size}' if size else ''}", ranks)
        for (op, size), ranks in sorted(blocked.calls.items(), key=lambda item: len(item[1]))
    ]
    if blocked.missing:
        have = "has" if len(blocked.missing) == 1 else "have"
        whom = " and ".join(f"{what} ({ranges(ranks)})" for what, ranks in calls)
        return (
            f"{names(sorted(blocked.missing))} {have} not reached {whom} {of}"
            if len(calls) > 1
            else (f"{names(sorted(blocked.missing))} {have} not reached {calls[0][0]} {of}")
        )
    if len(calls) > 1:
        each = ", ".join(f"{names(ranks)} {what}" for what, ranks in calls)
        return f"the ranks have called different collectives: {each}, {of}"
    everyone = f"all ranks have reached {calls[0][0]} {of}"
    return f"{everyone}, but it does not complete: check the network between them" if hangs else everyone


def names(ranks: Sequence[int], hosts: Sequence[str] = (), layout: Layout = UNKNOWN) -> str:
    """Return ranks for a message, such as ``ranks 0-1, 5 (node1, node2; pp=1)``: the coordinates that they share."""
    # The coordinate along an axis of all ranks would repeat the rank's number. A stage of a pipeline is always named.
    axes = [axis for axis in AXES if 1 < getattr(layout, axis) < layout.size or (axis == "pp" and layout.pp > 1)]
    shared = {axis: {layout.index(rank, axis) for rank in ranks} for axis in axes}
    at = ", ".join(f"{axis}={min(found)}" for axis, found in shared.items() if len(found) == 1)
    where = f"{', '.join(hosts[:SHOWN])}{', ...' if len(hosts) > SHOWN else ''}{f'; {at}' if at else ''}"
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{f' ({where})' if where else ''}"


def hosts_of(ranks: Sequence[int], by_rank: Mapping[int, Answer], world: World) -> list[str]:
    """Return the hosts of ``ranks``, each once. For a silent rank, it is the host on which the launcher placed it."""

    def host(rank: int) -> str:
        if rank in by_rank:
            return by_rank[rank].host
        node = world.node_of(rank)
        return world.hosts[node] if node < len(world.hosts) else f"node {node}"

    return list(dict.fromkeys(host(rank) for rank in ranks))


def all_stacks(answers: Sequence[Answer]) -> str:
    """Return the stacks of all ranks for a file; ranks with the same stacks are listed together."""
    alike: dict[str, list[Answer]] = {}
    for answer in answers:
        alike.setdefault(stacks.text_of(answer.stacks) or f"no stacks: {answer.state or 'silent'}\n", []).append(answer)
    paragraphs = []
    for text, group in alike.items():
        processes = ", ".join(f"{answer.rank}: {answer.host} process {answer.pid}" for answer in group)
        waits = "".join(
            f"rank {answer.rank} waits for {call['op']} number {call['seq']} of group {call['group']}: {call['size']}\n"
            for answer in group
            for call in answer.pending
        )
        paragraphs.append(f"{names([answer.rank for answer in group])}\n({processes})\n{waits}{text}")
    return "\n".join(paragraphs)
