"""``python -m wordrun.test_dist --bench``: how fast these ranks communicate, by operation, group of ranks and size.

algbw is size / time. busbw is what the slowest link carries if the algorithm is optimal, and can be compared between
numbers of ranks and with the link's data sheet: algbw x 2(n-1)/n for all-reduce, x (n-1)/n for all-gather,
reduce-scatter and all-to-all, x 1 for broadcast and point-to-point, as NVIDIA's nccl-tests define them. The size is
that of the largest buffer of a rank: of all-gather the output, of reduce-scatter the input.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from wordrun.common.errors import ConfigError
from wordrun.common.version import versions
from wordrun.dist import World, mpi, torch_private
from wordrun.dist.collectives import gather_json
from wordrun.dist.mesh import AXES, Layout

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
FACTOR = 4
"""Ratio of each size to the one before."""
BATCHES = 7
"""Number of timings of an operation; the least, the median and the greatest are shown."""
BATCH_S = 0.02
"""Minimum time of a timing [s], for which short operations are repeated."""
PAIR_BYTES = 4 * 2**20
"""Size of the messages between pairs of nodes."""
SHOWN_GROUPS = 3
TICKS = 8
"""Maximum number of labels on an axis."""
TITLES = f"  {'operation':<24}{'size':>9}{'time [us]':>12}{'min':>11}{'max':>11}{'algbw':>14}{'busbw [GB/s]':>14}"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, while other groups of the same kind do the same."""

    name: str
    ranks: tuple[int, ...]
    """This rank's group."""
    handle: Any


@dataclass(frozen=True)
class Result:
    """One operation at one size, on the slowest rank of the slowest group."""

    operation: str
    group: str
    ranks: int
    """Ranks in the group."""
    size: int
    """Bytes."""
    seconds_min: float
    seconds: float
    """Median."""
    seconds_max: float
    algbw: float
    """GB/s (10^9 bytes), by the median."""
    busbw: float
    """GB/s (10^9 bytes), by the median."""
    slowest: list[str]
    """The hosts of the slowest groups, slowest first, if there are several groups."""


def sizes(text: str) -> list[int]:
    """Return the sizes [bytes] of a range such as ``1KB..64MB``, or of a single size.

    Raises:
        ConfigError: it is not a range of sizes.
    """
    ends = [re.fullmatch(r"(\d+)\s*([KMG]?B?)", each.strip().upper()) for each in text.split("..")]
    numbers = [int(end[1]) * UNITS[end[2] if end[2] in UNITS else f"{end[2]}B"] for end in ends if end]
    if None in ends or len(ends) > 2 or not 4 <= numbers[0] <= numbers[-1]:
        raise ConfigError(
            f"--sizes {text} should be a range such as 1KB..64MB, of at least 4 bytes",
            page="backends.md#how-fast-do-the-ranks-communicate",
        )
    found = [numbers[0]]
    while found[-1] < numbers[-1]:
        found.append(min(found[-1] * FACTOR, numbers[-1]))
    return found


def layout(text: str, ranks: int) -> Layout | None:
    """Return the layout that ``--layout`` names, such as ``shard=4,tp=2``; None for an empty text.

    Raises:
        ConfigError: it names an unknown axis, or its product is not the number of ranks.
    """
    if not text:
        return None
    sizes = dict(each.partition("=")[::2] for each in text.split(","))
    known = f"the axes are {', '.join(AXES)}"
    if wrong := [name for name, size in sizes.items() if name not in AXES or not size.isdigit() or int(size) < 1]:
        raise ConfigError(
            f"--layout {text}: {wrong[0]} should be AXIS=RANKS; {known}",
            page="backends.md#how-fast-do-the-ranks-communicate",
        )
    found = Layout(**{name: int(size) for name, size in sizes.items()})
    if found.size != ranks:
        raise ConfigError(f"--layout {text} is for {found.size} ranks, but there are {ranks}: start {found.size}")
    return found


def measure(world: World, chosen: Sequence[int], axes: Layout | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all operations at the sizes ``chosen`` and return the results, the same on all ranks.

    Args:
        world: the ranks, whose process group exists.
        chosen: sizes [bytes].
        axes: also measure the groups of this layout.
        say: shows a line on rank 0.
    """
    nodes, hosts = zip(*gather_json([world.node, world.host], world.device), strict=True)
    results = []
    for group in groups(world, nodes, axes):
        say(f"{group.name}: {len(group.ranks)} ranks")
        say(TITLES)
        for name, (make, factor) in operations(world, group).items():
            for size in chosen:
                result = _timed(name, make, factor(len(group.ranks)), size, group, world, hosts)
                results.append(result)
                say(line(result))
    between = pairs(world) if world.nodes > 1 else []
    if between:
        named = (("slowest", between[0]), ("median", between[len(between) // 2]))
        shown = (f"{kind} {' - '.join(pair['hosts'])} {pair['gb_per_s']:.2f} GB/s" for kind, pair in named)
        say(f"pairs of nodes, {_size(PAIR_BYTES)}: {', '.join(shown)}")
    return {
        "device": world.device,
        "backend": td.get_backend(),
        "ranks": world.size,
        "nodes": world.nodes,
        "hosts": list(dict(zip(nodes, hosts, strict=True)).values()),
        "versions": versions(),
        "results": [asdict(result) for result in results],
        "pairs": between,
    }


def line(result: Result) -> str:
    """Return a result as a line of the table."""
    times = f"{1e6 * result.seconds:>12.1f}{1e6 * result.seconds_min:>11.1f}{1e6 * result.seconds_max:>11.1f}"
    slowest = f"  slowest: {', '.join(result.slowest)}" if result.slowest else ""
    return f"  {result.operation:<24}{_size(result.size):>9}{times}{result.algbw:>14.3f}{result.busbw:>14.3f}{slowest}"


def _size(size: int) -> str:
    unit = next(unit for unit in ("GB", "MB", "KB", "B") if size >= UNITS[unit])
    return f"{size / UNITS[unit]:g} {unit}"


def groups(world: World, nodes: Sequence[int], axes: Layout | None) -> Iterator[Group]:
    """Yield the groups of this rank: all ranks, those of its node, its peers on other nodes, and those of each axis.

    Args:
        world: this rank.
        nodes: the node of each rank.
        axes: the layout.
    """
    if world.size == 1:
        yield Group("all ranks", (0,), None)
        return
    yield Group("all ranks", tuple(range(world.size)), None)
    by_node = [tuple(rank for rank, at in enumerate(nodes) if at == node) for node in dict.fromkeys(nodes)]
    least = min(map(len, by_node))
    found: dict[str, list[tuple[int, ...]]] = {}
    if len(by_node) > 1 and least > 1:
        found["within a node"] = by_node
        found["across nodes"] = [tuple(ranks[i] for ranks in by_node) for i in range(least)]
    for axis in AXES if axes else ():
        along = sorted({tuple(axes.group(rank, axis)) for rank in range(world.size)})  # type: ignore[union-attr]
        if 1 < len(along[0]) < world.size:
            found[f"axis {axis}"] = along
    for name, members in found.items():
        handles = {ranks: td.new_group(list(ranks)) for ranks in members}  # every rank creates every group
        mine = next((ranks for ranks in members if world.rank in ranks), ())
        if mine:
            yield Group(name, mine, handles[mine])
        else:  # a rank in no group, on uneven nodes: it only takes part in collectives of all ranks
            yield Group(name, members[0], td.GroupMember.NON_GROUP_MEMBER)


Factor = Callable[[int], float]


def operations(world: World, group: Group) -> dict[str, tuple[Callable[[int], Call], Factor]]:
    """Return each operation by name: a function that prepares it for a size [bytes], and the ratio of bus bandwidth
    (busbw) to algorithm bandwidth (algbw) as a function of the number of ranks.
    """
    n, device, handle = len(group.ranks), torch.device(world.device), group.handle

    def buffer(size: int, shares: int = 1) -> torch.Tensor:
        """Return a buffer of ``shares`` / n of ``size`` bytes, at least one number for each share."""
        return torch.zeros(max(1, size // 4 // n) * shares, device=device)

    def all_reduce(size: int) -> Call:
        x = torch.zeros(max(1, size // 4), device=device)
        return lambda: td.all_reduce(x, group=handle)

    def all_gather(size: int) -> Call:
        shard, full = buffer(size), buffer(size, n)
        return lambda: torch_private.all_gather_single(full, shard, group=handle)

    def reduce_scatter(size: int) -> Call:
        shard, full = buffer(size), buffer(size, n)
        return lambda: torch_private.reduce_scatter_single(shard, full, group=handle)

    def broadcast(size: int) -> Call:
        x = torch.zeros(max(1, size // 4), device=device)
        return lambda: td.broadcast(x, group.ranks[0], group=handle)

    def all_to_all(size: int) -> Call:
        sent, received = buffer(size, n), buffer(size, n)
        return lambda: td.all_to_all_single(received, sent, group=handle)

    def point_to_point(size: int) -> Call:
        x = torch.zeros(max(1, size // 4), device=device)
        index = group.ranks.index(world.rank)
        other = group.ranks[index ^ 1] if index ^ 1 < n else None
        return lambda: _ping_pong(x, other, first=index % 2 == 0, group=handle)

    def all_reduce_mpi(size: int) -> Call:
        import numpy
        from mpi4py import MPI

        sent = numpy.zeros(max(1, size // 4), dtype=numpy.float32)
        received = numpy.empty_like(sent)
        return lambda: MPI.COMM_WORLD.Allreduce(sent, received)

    found: dict[str, tuple[Callable[[int], Call], Factor]] = {
        "all_reduce": (all_reduce, lambda n: 2 * (n - 1) / n),
        "all_gather": (all_gather, lambda n: (n - 1) / n),
        "reduce_scatter": (reduce_scatter, lambda n: (n - 1) / n),
        "broadcast": (broadcast, lambda n: 1),
        "all_to_all": (all_to_all, lambda n: (n - 1) / n),
    }
    if n > 1:
        found["point_to_point"] = (point_to_point, lambda n: 1)
    if handle is None and device.type == "cpu" and mpi.in_use(world):
        found["all_reduce (mpi4py)"] = (all_reduce_mpi, lambda n: 2 * (n - 1) / n)
    return found


def _ping_pong(x: torch.Tensor, other: int | None, *, first: bool, group: Any = None) -> None:
    """Send ``x`` there and back; without another rank do nothing."""
    if other is None:
        return
    for sends in (first, not first):
        (td.send if sends else td.recv)(x, other, group=group)


def _timed(
    name: str, make: Callable[[int], Call], factor: float, size: int, group: Group, world: World, hosts: Sequence[str]
) -> Result:
    """Time one operation at one size; every rank calls this, for its own group."""
    takes_part = group.handle is not td.GroupMember.NON_GROUP_MEMBER
    call = make(size) if takes_part else lambda: None
    legs = 2 if name == "point_to_point" else 1  # there and back
    _once(call, 1, world)  # connections, and memory that has never been touched
    repeats = max(1, math.ceil(BATCH_S / _agreed([_once(call, 1, world)], world)[0]))
    mine = [_once(call, repeats, world) / repeats / legs for _ in range(BATCHES)]
    times = _agreed(mine, world)
    slowest = []
    if len(group.ranks) < world.size and world.nodes > 1:
        medians = gather_json(statistics.median(mine) if takes_part else 0.0, world.device)
        order = sorted(range(world.size), key=lambda rank: -medians[rank])
        slowest = list(dict.fromkeys(hosts[rank] for rank in order))[:SHOWN_GROUPS]
    median = statistics.median(times)
    algbw = size / median / 1e9
    return Result(
        name, group.name, len(group.ranks), size, min(times), median, max(times), algbw, algbw * factor, slowest
    )


def _once(call: Call, repeats: int, world: World) -> float:
    """Return the seconds that ``repeats`` calls take, begun by all ranks together."""
    td.barrier()
    _wait(world)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(world)
    return time.perf_counter() - begin


def _wait(world: World) -> None:
    if not world.device.startswith("cpu"):
        torch.get_device_module(world.device).synchronize()


def _agreed(values: Sequence[float], world: World) -> list[float]:
    """Return the maximum of each of ``values`` over all ranks."""
    tensor = torch.tensor(values, device=world.device)
    td.all_reduce(tensor, op=td.ReduceOp.MAX)
    return [max(float(value), 1e-9) for value in tensor]


def rounds(nodes: int) -> Iterator[dict[int, int]]:
    """Yield the partner of each node in each round of a tournament, in which every pair of nodes meets once."""
    even = nodes + nodes % 2
    for turn in range(even - 1):
        ring = [0, *((turn + i) % (even - 1) + 1 for i in range(even - 1))]
        met = {}
        for a, b in zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True):
            if a < nodes and b < nodes:
                met[a], met[b] = b, a
        yield met


def pairs(world: World) -> list[dict[str, Any]]:
    """Return the bandwidth of each pair of nodes, between their first ranks, slowest first."""
    firsts = {
        node: rank
        for rank, (node, local) in enumerate(gather_json([world.node, world.local_rank], world.device))
        if local == 0
    }
    mine: dict[int, float] = {}
    x = torch.ones(PAIR_BYTES // 4, device=world.device)
    for met in rounds(world.nodes):
        td.barrier()
        other = met.get(world.node) if world.local_rank == 0 else None
        if other is None:
            continue
        times = []
        for _ in range(BATCHES):
            begin = time.perf_counter()
            _ping_pong(x, firsts[other], first=world.node < other)
            _wait(world)
            times.append((time.perf_counter() - begin) / 2)
        mine[other] = min(times[1:])
    everyone = gather_json([world.node, list(mine.items())], world.device)
    names = gather_json([world.node, world.host], world.device)
    host = dict(map(tuple, names))
    found = [
        {"hosts": [host[node], host[other]], "seconds": seconds, "gb_per_s": PAIR_BYTES / seconds / 1e9}
        for node, met in everyone
        for other, seconds in met
        if node < other
    ]
    return sorted(found, key=lambda pair: -float(pair["seconds"]))


def save(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write bandwidth.json and bandwidth.png; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bandwidth.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _figure(found, folder / "bandwidth.png")
    return [folder / "bandwidth.json", folder / "bandwidth.png"]


def _figure(found: dict[str, Any], file: Path) -> None:
    """Draw busbw over size, a panel for each kind of group."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(result["group"] for result in found["results"]))
    figure = Figure(figsize=(7, 3.6 * len(kinds)), layout="constrained", dpi=130)
    for kind, axes in zip(kinds, figure.subplots(len(kinds), squeeze=False)[:, 0], strict=True):
        results = [result for result in found["results"] if result["group"] == kind]
        for operation in dict.fromkeys(result["operation"] for result in results):
            of = [result for result in results if result["operation"] == operation]
            axes.plot([r["size"] for r in of], [r["busbw"] for r in of], "o-", ms=3, lw=1.2, label=operation)
        title = f"{kind}: {results[0]['ranks']} ranks, {found['backend']} on {found['device'].partition(':')[0]}"
        axes.set(yscale="log", xlabel="size", ylabel="busbw [GB/s]", title=title)
        axes.set_xscale("log", base=2)
        sizes = sorted({result["size"] for result in results})
        axes.set_xticks(sizes, [_size(size) for size in sizes], rotation=45 if sizes[TICKS:] else 0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file)
