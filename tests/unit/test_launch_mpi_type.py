"""Which --mpi type ``launch`` gives to srun, for each MPI library and each configuration of SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from wordrun.launch.job import Job
from wordrun.launch.launchers import LAUNCHERS, srun
from wordrun.launch.launchers.base import LauncherSearch, own_bin
from wordrun.launch.options import Options
from wordrun.launch.site import UNKNOWN, Site

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-device=ch4:ucx,ofi"
UCX_MPICH = "MPICH Version:\t4.3.0\nMPICH Device:\tch4:ucx\nMPICH configure:\t--with-pmi=pmi2"
PMIX_MPICH = "MPICH Version:\t4.3.0\nMPICH configure:\t--with-pmix=/usr"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"
OPENMPI = "Open MPI v4.1.4, package: Debian OpenMPI"
INTEL = "Intel(R) MPI Library 2021.11 for Linux* OS"
ALL = "none cray_shasta pmi2 pmix"
JOB = Job(hosts=("n1",), cores=(4,), devices=(0,), slots=(4,), scheduler="slurm", id="7")


def choose(folder: Path, library: str, listed: str, default: str, site: Site = UNKNOWN, **env: str) -> srun.Choice:
    """Return the choice where python loads ``library``, srun lists ``listed`` and MpiDefault is ``default``."""
    command = env.pop("command", "python")
    stubs = {
        "srun": f"printf 'MPI plugin types are...\\n'; for each in {listed}; do echo $each; done >&2",
        "scontrol": f"echo 'MpiDefault              = {default}'",
        "python": f"cat {folder}/library",
        "job.sh": "python x.py",
    }
    (folder / "library").write_text(library)
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{own_bin()}:/usr/bin:/bin"
    options = Options(command=(command,), launcher_args=tuple(filter(None, [env.pop("args", "")])))
    return srun.choose_mpi_type("srun", LauncherSearch(None, 4, {"PATH": path, **env}, JOB, site, LAUNCHERS, options))


@pytest.mark.parametrize(
    ("library", "listed", "default", "expected"),
    [
        (MPICH, ALL, "none", "pmi2"),
        (MPICH, ALL, "pmix", "pmi2"),
        (MPICH, ALL, "pmi2", ""),
        (MPICH, ALL, "pspmix", ""),  # a plugin that only the site knows
        (PMIX_MPICH, ALL, "none", "pmix"),
        (PMIX_MPICH, "none pmi2", "none", "pmi2"),
        (CRAY, ALL, "none", "cray_shasta"),
        (CRAY, "none pmi2", "none", "pmi2"),
        (OPENMPI, ALL, "none", "pmix"),
        (OPENMPI, ALL, "pmix_v4", ""),
        (INTEL, ALL, "none", "pmi2"),
        ("No module named 'mpi4py'", ALL, "none", ""),
    ],
)
def test_the_type_is_one_that_the_library_supports(
    tmp_path: Path, library: str, listed: str, default: str, expected: str
) -> None:
    chosen, why, note, _ = choose(tmp_path, library, listed, default)
    assert (chosen, note) == (expected, "")
    assert f"--mpi={expected}: python loads" in why if expected else "SLURM's default" in why


def test_a_library_that_srun_cannot_start_is_named_at_once(tmp_path: Path) -> None:
    chosen, _, note, _ = choose(tmp_path, OPENMPI, "none pmi2", "none")
    assert chosen == ""
    assert "Open MPI v4.1.4, which needs --mpi=pmix" in note
    assert "each rank of an MPI program will be rank 0 of 1" in note


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_MPI_TYPE": "pmix"}, ""),
        ({"SLURM_MPI_TYPE": "none", "SLURM_STEP_ID": "4294967290"}, "pmi2"),  # by SLURM, in salloc's own step
        ({"SLURM_MPI_TYPE": "pmix", "SLURM_STEP_ID": "4294967290"}, ""),
        ({"args": "--mpi=none"}, ""),
        ({"command": "job.sh"}, "pmi2"),
    ],
    ids=str,
)
def test_the_users_choice_wins(tmp_path: Path, env: dict[str, str], expected: str) -> None:
    assert choose(tmp_path, MPICH, ALL, "none", **env)[0] == expected


def test_the_sites_choice_and_default_win_over_a_guess(tmp_path: Path) -> None:
    assert choose(tmp_path, MPICH, ALL, "none", Site(srun_args=("--mpi=pmix",)))[0] == ""
    assert choose(tmp_path, MPICH, ALL, "pmix", command="job.sh")[0] == ""  # which may start another MPI


@pytest.mark.parametrize(
    ("library", "default", "env", "expected"),
    [
        (MPICH, "none", {}, "ofi"),
        (MPICH, "pmi2", {}, "ofi"),
        (MPICH, "none", {"MPIR_CVAR_CH4_NETMOD": "ucx"}, ""),
        (MPICH, "none", {"args": "--mpi=pmi2"}, ""),  # then the library is not asked
        (UCX_MPICH, "none", {}, ""),  # it has no other
        (PMIX_MPICH, "none", {}, ""),
    ],
)
def test_mpich_uses_addresses_that_pmi2_can_carry(
    tmp_path: Path, library: str, default: str, env: dict[str, str], expected: str
) -> None:
    assert choose(tmp_path, library, ALL, default, **env).network == expected
