"""Make any torch script distributed, whatever launcher started it::

    import torch
    import wordrun.dist as dist

    with dist.session() as world:
        model = torch.nn.Linear(8, 8).to(world.device)
        model = torch.nn.parallel.DistributedDataParallel(model)
        print(world)

``session`` is ``setup``, ``guard`` and ``cleanup`` in one. Importing this module imports neither torch nor mpi4py.
"""

from wordrun.dist.coordination import broadcast, monitored_barrier
from wordrun.dist.failure import abort, guard
from wordrun.dist.setup import (
    cleanup,
    discover_or_exit,
    identify,
    session,
    setup,
)
from wordrun.dist.world import World, discover

__all__ = [
    "World",
    "abort",
    "broadcast",
    "cleanup",
    "discover",
    "discover_or_exit",
    "guard",
    "identify",
    "monitored_barrier",
    "session",
    "setup",
]
