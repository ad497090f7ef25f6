"""Flux."""

import subprocess

from wordrun.common.errors import ConfigError
from wordrun.common.slurm import expand_hosts
from wordrun.launch.job import Job
from wordrun.launch.schedulers.base import Scheduler, default_slots, devices_of


class Flux(Scheduler):
    """Hosts are queried from the instance that FLUX_URI names."""

    name = "flux"
    variable = "FLUX_URI"

    def read(self, env, host, site):
        if "FLUX_TASK_RANK" in env:
            raise ConfigError(f"this is already rank {env['FLUX_TASK_RANK']} of a Flux job (FLUX_TASK_RANK)")
        hosts = expand_hosts(_attribute("hostlist"), "flux getattr hostlist")
        devices, why = devices_of(host, site)
        return Job(
            hosts=hosts,
            cores=(site.cores or host.cores,) * len(hosts),
            devices=(devices,) * len(hosts),
            slots=default_slots(site, devices, (1,) * len(hosts)),
            scheduler="flux",
            id=_attribute("jobid"),
            reasons={
                "scheduler": "FLUX_URI",
                "hosts": "flux getattr hostlist",
                "cores": host.cores_why,
                "devices": why,
            },
        )


def _attribute(name):
    try:
        return subprocess.run(["flux", "getattr", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"FLUX_URI is set, but flux getattr {name} fails: {error}") from None
