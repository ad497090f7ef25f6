"""Smoke check: can these ranks find each other, exchange the right values, and train together?

    launch -n 2 python -m wordrun.test_dist

Prints a line per rank, checks each collective on every rank, trains a small network under DDP on synthetic data,
and shows where the time went. If a check fails, it is named, and the exit status is non-zero. With --bench it measures
how fast the ranks communicate instead of training.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from wordrun import dist
from wordrun.common import exit_reports, sigint
from wordrun.common.errors import UserError
from wordrun.dist.rendezvous import shared_store

if TYPE_CHECKING:
    import torch


Check = Callable[[dist.World, ModuleType], None]
"""Raises if a result is wrong; takes torch.distributed, which must not be imported at module level."""


class CheckError(UserError):
    """A check that failed, with its name, rank and values."""

    page = "install.md#check-the-installation"


@exit_reports.unfinished()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks with ``argv`` (default: the command line) and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m wordrun.test_dist", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or xpu (default auto)")
    parser.add_argument("--timeout", type=int, default=120, help="seconds until a stuck collective fails (default 120)")
    parser.add_argument("--bench", action="store_true", help="measure bandwidths instead of training")
    parser.add_argument("--sizes", default="1KB..64MB", help="sizes for --bench, in steps of 4 (default 1KB..64MB)")
    parser.add_argument(
        "--layout",
        default="",
        metavar="AXIS=N,...",
        help="also measure the axes of this layout (pp, replicate, shard, cp, tp), such as shard=4,tp=2",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for bandwidth.json and bandwidth.png (default outputs/bandwidth/TIME)"
    )
    parser.add_argument("--no-profile", action="store_true", help="leave out the PyInstrument profile")
    args = parser.parse_args(argv)

    begin = time.perf_counter()
    with sigint.ending_at_once(), dist.session(device=args.device, timeout_s=args.timeout, seed=0) as world:
        # One write including the newline: unbuffered, print makes two, which other ranks' output may split.
        sys.stdout.write(f"{world} {world.host}\n")
        sys.stdout.flush()
        for name, check in CHECKS.items():
            _say(world, f"{name}: ok ({_timed(check, name, world):.1f} ms)")
        if args.bench:
            bench(world, args.sizes, args.layout, args.out)
            return 0
        profile = _profiled(lambda: train(world, args.steps), world, show=not args.no_profile)
        _say(world, f"{profile}passed on {world.size} ranks in {time.perf_counter() - begin:.1f} s")
    return 0


def bench(world: dist.World, sizes: str, layout: str, out: str | None) -> None:
    """Measure the bandwidth of each operation; rank 0 prints a table, and writes it to files below ``out``.

    Raises:
        ConfigError: ``sizes`` or ``layout`` is not valid.
    """
    from wordrun.dist import bandwidth

    chosen, axes = bandwidth.sizes(sizes), bandwidth.layout(layout, world.size)
    found = bandwidth.measure(world, chosen, axes, lambda text: _say(world, text))
    if world.rank == 0:
        folder = Path(out or f"outputs/bandwidth/{time.strftime('%Y%m%d-%H%M%S')}")
        print(*bandwidth.save(found, folder), sep="\n", flush=True)


def _say(world: dist.World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _timed(check: Check, name: str, world: dist.World) -> float:
    import torch.distributed as td

    begin = time.perf_counter()
    try:
        check(world, td)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise CheckError(f"check {name} failed on {world.host}: {kind}{error}") from error
    return 1000 * (time.perf_counter() - begin)


def _expect(found: torch.Tensor, expected: Sequence[float]) -> None:
    wanted = [float(value) for value in expected]
    assert found.tolist() == wanted, f"got {found.tolist()}, expected {wanted}"


def _mine(world: dist.World, value: float) -> torch.Tensor:
    import torch

    return torch.full((3,), float(value), device=world.device)


def all_reduce(world: dist.World, td: ModuleType) -> None:
    """The sum of 1 + rank arrives on every rank."""
    x = _mine(world, 1 + world.rank)
    td.all_reduce(x)
    _expect(x, [world.size * (world.size + 1) / 2] * 3)


def reduce(world: dist.World, td: ModuleType) -> None:
    """The sum of 1 + rank arrives on the last rank."""
    x, root = _mine(world, 1 + world.rank), world.size - 1
    td.reduce(x, dst=root)
    if world.rank == root:
        _expect(x, [world.size * (world.size + 1) / 2] * 3)


def broadcast(world: dist.World, td: ModuleType) -> None:
    """The last rank's values arrive on every rank."""
    x, root = _mine(world, 10 + world.rank), world.size - 1
    td.broadcast(x, src=root)
    _expect(x, [10 + root] * 3)


def all_gather(world: dist.World, td: ModuleType) -> None:
    """Every rank gets every rank's values, in the order of ranks."""
    import torch

    parts = [torch.empty(3, device=world.device) for _ in range(world.size)]
    td.all_gather(parts, _mine(world, world.rank))
    _expect(torch.cat(parts), [float(rank) for rank in range(world.size) for _ in range(3)])


def scatter(world: dist.World, td: ModuleType) -> None:
    """Every rank gets its own part from rank 0."""
    parts = [_mine(world, 100 + rank) for rank in range(world.size)] if world.rank == 0 else None
    x = _mine(world, -1)
    td.scatter(x, parts, src=0)
    _expect(x, [100 + world.rank] * 3)


def barrier(world: dist.World, td: ModuleType) -> None:
    """No rank leaves before all have arrived."""
    arrived = [f"wordrun/test_dist/arrived/{rank}" for rank in range(world.size)]
    store = shared_store(world)
    if world.rank == 0:
        time.sleep(0.05)  # so that the others have to wait
    store.set(arrived[world.rank], "1")
    td.barrier()
    assert store.check(arrived), "a rank left the barrier before all had arrived"


def train(world: dist.World, steps: int = 100) -> None:
    """Train a small network under DDP: the loss falls, and the weights stay equal on all ranks."""
    import torch
    import torch.distributed as td
    from torch.nn.parallel import DistributedDataParallel

    from wordrun.dist.collectives import all_mean

    torch.manual_seed(0)
    truth = torch.randn(16, 4, device=world.device)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).to(world.device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + world.rank)  # different data on each rank
    losses = []
    for step in range(1, steps + 1):
        x = torch.randn(32, 16, device=world.device)
        loss = (replica(x) - torch.tanh(x @ truth)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_mean(loss).item())
        if step in (1, steps) or step % 25 == 0:
            _say(world, f"train: step {step}/{steps} loss {losses[-1]:.4f}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(world.size)]
    td.all_gather(everyone, weights)
    differing = [rank for rank, other in enumerate(everyone) if not torch.equal(other, weights)]
    if differing:
        raise CheckError(f"check train failed on {world.host}: weights differ from those of ranks {differing}")
    if steps >= 20 and losses[-1] > 0.7 * losses[0]:
        raise CheckError(f"check train failed: the loss did not fall (first {losses[0]:.4f}, last {losses[-1]:.4f})")


CHECKS: dict[str, Check] = {
    check.__name__: check for check in (all_reduce, reduce, broadcast, all_gather, scatter, barrier)
}


def _profiled(action: Callable[[], None], world: dist.World, show: bool) -> str:
    """Run ``action`` and return its profile on rank 0, else an empty string."""
    if world.rank != 0 or not show:
        action()
        return ""
    from pyinstrument import Profiler

    with Profiler() as profiler:
        action()
    return profiler.output_text(unicode=True, color=False) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
