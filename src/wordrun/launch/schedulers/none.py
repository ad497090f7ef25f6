"""No scheduler: this machine alone."""

from __future__ import annotations

from collections.abc import Mapping

from wordrun.launch.job import Job, LocalHost
from wordrun.launch.schedulers.base import Scheduler
from wordrun.launch.site import Site


class NoScheduler(Scheduler):
    """A laptop, a workstation, or a single node of a job."""

    name = "none"

    def read(self, env: Mapping[str, str], host: LocalHost, site: Site) -> Job:
        """Return this machine as a job of one host."""
        return Job(
            hosts=(host.name,),
            cores=(host.cores,),
            devices=(host.devices,),
            slots=(max(1, host.devices),),
            reasons={"hosts": "this machine's name", "cores": host.cores_why, "devices": host.devices_why},
        )
