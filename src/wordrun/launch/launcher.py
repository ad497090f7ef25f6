"""Which program starts the ranks, which of its kinds it is, and a free port for them to meet at."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wordrun.errors import ConfigError
from wordrun.launch.job import Job
from wordrun.launch.site import Site
from wordrun.ports import PORTS, pick

# What `mpiexec --version` says of itself. Intel MPI's is a Hydra too.
VERSION_TEXTS = {"HYDRA": "hydra", "Intel(R) MPI": "hydra", "Open MPI": "openmpi", "OpenRTE": "openmpi",
                 "PRRTE": "openmpi", "prterun": "openmpi", "PALS": "pals"}  # fmt: skip
FILE_NAMES = {"hydra": "hydra", "mpich": "hydra", "orterun": "openmpi", "prte": "openmpi", "openmpi": "openmpi",
              "/pals/": "pals"}  # fmt: skip


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    kind: str
    """Its family: pals, srun, hydra, openmpi, torchrun or local."""
    path: str = ""
    """The mpiexec or python that is run; empty for local."""
    why: str = ""


def choose(
    wanted: str | None, np: int, env: Mapping[str, str], job: Job | None = None, site: Site | None = None
) -> Launcher:
    """Return the launcher that ``--launcher`` names, else the best that this machine or job has for ``np`` ranks.

    Raises:
        ConfigError: it is not there, or cannot do what is asked.
    """
    scheduler = job.scheduler if job else "none"
    if wanted == "srun" or (wanted is None and scheduler == "slurm"):
        return _srun(wanted, env, scheduler)
    if wanted == "pals" or (wanted is None and scheduler == "pbs" and site and site.launcher == "pals"):
        return _pals(env, site)
    several_hosts = job is not None and len(job.hosts) > 1
    if wanted == "local" or (wanted is None and np == 1 and scheduler == "none" and not several_hosts):
        if np > 1:
            raise ConfigError(f"--launcher local starts one process, not {np}: leave it out, or leave -n out")
        return Launcher("local", why="--launcher local" if wanted else "one process needs no mpiexec")
    kinds = (wanted,) if wanted else (site.launcher,) if site and scheduler == site.scheduler else ("hydra", "openmpi")
    passed_over: list[str] = []
    if wanted != "torchrun":
        # The site's own first: an environment's MPICH knows nothing of the scheduler's hosts.
        for path, where in candidates(env, own_first=scheduler == "none"):
            kind, told_by = flavour(path, env)
            if kind in kinds:
                return Launcher(kind, path, "; ".join([f"{kind} by {told_by}", where, *passed_over]))
            passed_over.append(f"passed over {path} ({kind or 'unknown kind'} by {told_by})")
    if wanted == "torchrun" or (wanted is None and not several_hosts):
        if has_torch():
            why = "--launcher torchrun" if wanted else "; ".join(["no usable mpiexec", *passed_over])
            return Launcher("torchrun", sys.executable, why)
        raise ConfigError(
            f"no launcher for {np} ranks: "
            + ("torchrun comes with torch, which is not installed" if wanted else "no mpiexec in PATH, and no torch")
            + " (pip install 'wordrun[mpich]' brings an mpiexec)"
        )
    found = f" ({'; '.join(passed_over)})" if passed_over else ""
    remedy = " (pip install 'wordrun[mpich]' brings one)" if wanted == "hydra" else ""
    asked = f"--launcher {wanted}" if wanted else f"no launcher for several hosts ({' or '.join(kinds)})"
    raise ConfigError(f"{asked}: no mpiexec of this kind beside python or in PATH{found}{remedy}")


def _srun(wanted: str | None, env: Mapping[str, str], scheduler: str) -> Launcher:
    if scheduler != "slurm":
        raise ConfigError("--launcher srun: SLURM_JOB_ID is not set; salloc or sbatch gives a job to start ranks in")
    path, _ = find_command("srun", env.get("PATH", ""))
    if not path:
        raise ConfigError(
            "this is a SLURM job, but there is no srun in PATH (a container often has none): launch outside of it, "
            "or use --launcher hydra, openmpi or torchrun"
        )
    return Launcher("srun", path, "--launcher srun" if wanted else "SLURM's own, in PATH")


def _pals(env: Mapping[str, str], site: Site | None) -> Launcher:
    """Find PALS's mpiexec: an activated conda environment often puts another one, which starts singletons, first."""
    import glob

    passed_over: list[str] = []
    for pattern in site.launcher_paths if site else ():
        for path in sorted(glob.glob(pattern), reverse=True):
            if _runnable(path):
                return Launcher("pals", path, f"site {site.name if site else ''}: {pattern}")
    for path, where in candidates(env, own_first=False):
        kind, told_by = flavour(path, env)
        if kind == "pals":
            return Launcher("pals", path, "; ".join([f"pals by {told_by}", where, *passed_over]))
        passed_over.append(f"passed over {path} ({kind or 'unknown kind'} by {told_by}: knows nothing of PALS's nodes)")
    looked = ", ".join(site.launcher_paths) if site else ""
    raise ConfigError(
        "no mpiexec of PALS: "
        + "; ".join([f"nothing at {looked}" if looked else "", *passed_over, "module load cray-pals"]).lstrip("; ")
    )


def candidates(env: Mapping[str, str], *, own_first: bool = True) -> Iterator[tuple[str, str]]:
    """Yield each mpiexec with where it was found: the environment's own first or last, and PATH in order."""
    seen: set[str] = set()
    own = [(own_bin(), "beside this python")]
    others = [(folder, "in PATH") for folder in env.get("PATH", "").split(os.pathsep) if folder not in ("", own_bin())]
    places = own + others if own_first else others + own
    for directory, where in places:
        for name in ("mpiexec", "mpiexec.hydra", "mpirun"):
            path = os.path.join(directory, name)
            if os.path.realpath(path) not in seen and _runnable(path):
                seen.add(os.path.realpath(path))
                yield path, where


def flavour(path: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind of an mpiexec (empty: unknown) and what told it: the real file's name, else ``--version``."""
    real = os.path.realpath(path)
    for part, kind in FILE_NAMES.items():
        if part in (real if "/" in part else os.path.basename(real)):
            return kind, f"its real path {real}"
    import subprocess

    try:
        run = subprocess.run([path, "--version"], env=dict(env), capture_output=True, text=True, timeout=10,
                             stdin=subprocess.DEVNULL, errors="replace")  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__} from --version"
    text = run.stdout + run.stderr
    return next((kind for part, kind in VERSION_TEXTS.items() if part in text), ""), "its --version"


def own_bin() -> str:
    """Return the directory of this environment's commands, where ``launch`` and ``python`` lie."""
    return os.path.join(sys.prefix, "bin")


def has_torch() -> bool:
    """Say whether torch is installed, without importing it."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


def find_command(word: str, path: str) -> tuple[str, str]:
    """Return the file that ``word`` runs, and else a file of that name that is not executable (or two "").

    Args:
        word: first word of the command.
        path: the PATH in which it will be looked for.
    """
    places = [""] if "/" in word else path.split(os.pathsep)
    files = [os.path.join(place, word) for place in places]
    runnable = next((file for file in files if _runnable(file)), "")
    plain = next((file for file in [word, *files] if os.path.isfile(file)), "")
    return runnable, plain


def _runnable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def free_port() -> int:
    """Return a port that nobody listens at; drawn at random, so that two launches at once draw different ones."""
    for _ in range(200):
        port = pick(os.urandom(4))
        if is_free(port):
            return port
    raise ConfigError(f"no free port between {PORTS[0]} and {PORTS[-1]}: name one by --env MASTER_PORT=P")


def is_free(port: int) -> bool:
    """Say whether this machine would let a server listen at ``port``, on every address."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                # As torch's store does: a port that only lingers after an earlier job counts as free.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address, port))
        except OSError as error:
            import errno

            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False  # any other error: this machine has no such address family
    return True
