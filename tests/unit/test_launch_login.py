"""launch where a scheduler is, but no job: on login nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from wordrun.common.errors import ConfigError
from wordrun.launch.job import LocalHost
from wordrun.launch.login_node import check_nodes, login_note
from wordrun.launch.options import Options
from wordrun.launch.schedulers import find_job


def at(host: str, env: Mapping[str, str], options: Options) -> str:
    """Return what launch says on ``host``: the note, or the refusal of more nodes."""
    job = find_job(options.scheduler, env, LocalHost(host, 2, "affinity", 0, "none"))
    try:
        check_nodes(options, job, host, env)
    except ConfigError as error:
        return str(error)
    return login_note(options, job, host, env)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with qsub."""
    (tmp_path / "qsub").write_text("#!/bin/sh\n")
    (tmp_path / "qsub").chmod(0o755)
    return {"PATH": str(tmp_path), "HOME": "/nobody"}


NAMES = {"polaris-login-02": "polaris's login node", "login7": "a login node", "uan01": "a login node", "desk": ""}


@pytest.mark.parametrize(("host", "name"), NAMES.items())
def test_a_login_node(host: str, name: str, env: dict[str, str]) -> None:
    note = at(host, env, Options())
    instead = "the processes start here (launch --submit or qsub -I for nodes)"
    assert note == (f"no PBS job: this looks like {name}, and {instead}" if name else "")
    refusal = at(host, env, Options(nodes=2))
    assert ("would fit" in refusal) == (not name)  # not known to be a login node
    assert f"no PBS job: this looks like {name}; launch --submit -N 2 --walltime H:MM:SS" in refusal or not name
    shell = "qsub -I -l select=2 -l place=scatter starts a shell in one" if name else "add --submit, or use qsub -I)"
    assert refusal.endswith(shell)


def test_other_machines(env: dict[str, str]) -> None:
    nowhere = {**env, "PATH": os.devnull}
    assert at("laptop", env, Options()) == at("login7", nowhere, Options(nodes=2)) == ""
    assert "no SLURM job: this looks like perlmutter's" in at(
        "login7", {**nowhere, "NERSC_HOST": "perlmutter"}, Options(nodes=2)
    )
    hosts = Path(env["PATH"]) / "nodes"
    hosts.write_text("x3209c0s19b0n0\n")
    job = {**env, "PBS_JOBID": "1", "PBS_NODEFILE": str(hosts)}
    for chosen, here in ((Options(), job), (Options(scheduler="none"), job), (Options(scheduler="none"), env)):
        assert at("polaris-login-02", here, chosen) == ""
