"""The launchers that ``launch`` knows, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wordrun.launch.job import Job
from wordrun.launch.launchers.base import Launcher, LauncherSearch
from wordrun.launch.launchers.hydra import Hydra
from wordrun.launch.launchers.local import Local
from wordrun.launch.launchers.openmpi import OpenMPI
from wordrun.launch.launchers.pals import PALS
from wordrun.launch.launchers.srun import Srun
from wordrun.launch.launchers.torchrun import Torchrun
from wordrun.launch.options import Options
from wordrun.launch.site import UNKNOWN, Site

LAUNCHERS: dict[str, type[Launcher]] = {each.name: each for each in (PALS, Hydra, OpenMPI, Srun, Torchrun, Local)}
"""By name, as in --launcher."""


def choose(
    wanted: str | None, np: int, env: Mapping[str, str], job: Job, site: Site = UNKNOWN, options: Options | None = None
) -> Launcher:
    """Return the launcher named by ``--launcher``, else the best one on this machine or in this job for ``np`` ranks.

    Raises:
        ConfigError: it was not found, or does not support what is requested.
    """
    search = LauncherSearch(wanted, np, env, job, site, LAUNCHERS, options or Options())
    kind = LAUNCHERS[wanted] if wanted else next((each for each in LAUNCHERS.values() if each.is_default(search)), None)
    if kind:
        return kind.find(search)
    of_site = site.launcher and job.scheduler == site.scheduler
    names = (site.launcher,) if of_site else tuple(name for name, each in LAUNCHERS.items() if each.anywhere)
    found, passed_over = search.mpiexec(*names)
    if found:
        return found
    if len(job.hosts) == 1:
        torchrun = Torchrun.find(search)
        return replace(torchrun, why="; ".join([torchrun.why, *passed_over]))
    remedy = " or ".join(filter(None, (LAUNCHERS[name].remedy for name in names)))
    raise search.not_found(f"no launcher for several hosts ({' or '.join(names)})", passed_over, remedy)
