"""The number of ranks on each host."""

from __future__ import annotations

from collections.abc import Sequence

from wordrun.common.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.options import Options
from wordrun.launch.request import Ranks


def decide_ranks(options: Options, job: Job) -> Ranks:
    """Return the number of ranks on each host for -n, -N and --ppn.

    Any two of them determine the third. Without any of them, each host gets the job's slots.

    Raises:
        ConfigError: the options contradict each other or the job; the message says what would fit.
    """
    have = len(job.hosts)
    np, nodes, ppn = options.np, options.nodes, options.ppn
    asked = " ".join(f"{name} {value}" for name, value in (("-n", np), ("-N", nodes), ("--ppn", ppn)) if value)
    if nodes is not None and nodes > have:
        raise ConfigError(f"{asked}: {job.title} is {have} node{'s' * (have > 1)}; -N {have}, or no -N, would fit")
    if ppn is not None and np is not None:
        needed = -(-np // ppn)
        if np % ppn or needed > have or (nodes is not None and nodes * ppn != np):
            asks = f"need {needed} nodes of {ppn}" if np % ppn == 0 else f"cannot be divided into nodes of {ppn}"
            fits = (nodes or have) * ppn
            remedy = f"-n {fits} --ppn {ppn} would fit, or -n {np} without --ppn"
            raise ConfigError(f"{asked}: {np} ranks {asks}, and {job.title} has {nodes or have}; {remedy}")
        return _checked((ppn,) * needed, asked, job)
    if ppn is not None:
        nodes = nodes or have
        return _checked((ppn,) * nodes, f"{asked}: {ppn} on each of {nodes}", job)
    if np is not None:
        return Ranks(_spread(np, nodes, job, asked), asked)
    nodes = nodes or have
    slots = job.slots[:nodes]
    why = f"one per device ({sum(slots)} found)" if any(job.devices[:nodes]) else "no devices, so a single process"
    if not job.is_local and not any(job.devices[:nodes]):
        why = f"{'+'.join(map(str, slots)) if nodes < 9 else sum(slots)} by the scheduler or the site"
    return Ranks(slots, f"{asked}: {why}" if asked else why)


def _spread(np: int, nodes: int | None, job: Job, asked: str) -> tuple[int, ...]:
    """Return the ranks on each host for ``np`` ranks: the fewest hosts with enough slots, filled in order.

    With -N, or with too few slots, the ranks are distributed evenly over all hosts, as far as cores allow. Ranks share
    devices only if --ppn is given.
    """
    slots = job.slots[: nodes or None]
    shared = not job.is_local and any(job.devices)
    room = slots if shared else _room(job)[: nodes or None]
    if np < (nodes or 1):
        raise ConfigError(f"{asked}: {np} ranks cannot be spread over {nodes} nodes; -N {np}, or -n {nodes}, would fit")
    if np <= sum(slots) and not (nodes and np % nodes == 0 and all(np // nodes <= most for most in room)):
        layout: list[int] = []
        for at, most in enumerate(slots):
            # Each host requested by -N gets a rank.
            kept_back = nodes - at - 1 if nodes else 0
            layout.append(min(most, np - sum(layout) - kept_back))
            if sum(layout) == np:
                return tuple(layout)
    hosts = len(slots)
    layout = [np // hosts + (host < np % hosts) for host in range(min(hosts, np))]
    if any(ranks > most for ranks, most in zip(layout, room, strict=False)):
        may_share = np % hosts == 0 and all(np // hosts <= most for most in _room(job)[:hosts])
        raise ConfigError(
            f"{asked}: {job.title} has room for {sum(room)} ranks on {hosts} node{'s' * (hosts > 1)} "
            f"({listed(room)}{'' if shared else ' by devices and cores'}); -n {sum(room)} would fit"
            + (f", or -n {np} --ppn {np // hosts} to let ranks share devices" if shared and may_share else ""),
            page="launch.md#in-a-slurm-or-pbs-job",
        )
    return tuple(layout)


def _checked(layout: tuple[int, ...], why: str, job: Job) -> Ranks:
    room = _room(job)[: len(layout)]
    if any(ranks > most for ranks, most in zip(layout, room, strict=True)):
        has = f"{job.title} has room for {listed(room)} ranks on its nodes, by devices and cores"
        raise ConfigError(f"{why}: {has}; --ppn {min(room)} would fit")
    return Ranks(layout, why)


def _room(job: Job) -> tuple[float, ...]:
    """Return the maximum number of ranks on each host; there is no limit without a scheduler."""
    if job.is_local:
        return (float("inf"),) * len(job.hosts)
    return tuple(max(slots, cores) for slots, cores in zip(job.slots, job.cores, strict=True))


def listed(numbers: Sequence[float]) -> str:
    """Format the ranks or cores of each host for a message, such as 4+4+3."""
    return "+".join(map(str, numbers)) if len(numbers) < 9 else f"{numbers[0]}+...+{numbers[-1]}"
