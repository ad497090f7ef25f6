"""Choose srun's ``--mpi`` type: with the wrong one, each rank of an MPI program is rank 0 of 1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wordrun.common import slurm
from wordrun.launch.launchers.base import LauncherSearch, find_command, own_bin

# MPI libraries by their version texts, and the types that each supports, the best one first. Builds of MPICH that
# support PMIx name it among their configure options.
LIBRARIES = (
    (r"CRAY MPICH version \S+", ("cray_shasta", "pmi2")),
    (r"Open MPI v?[\d.]+", ("pmix",)),
    (r"MPICH Version:\s*\S+(?=[\s\S]*--with-pmix)", ("pmix", "pmi2")),
    (r"MPICH Version:\s*\S+|MVAPICH\S* Version\s*:\s*\S+|Intel\(R\) MPI Library \S+", ("pmi2",)),
)
# Programs that print the version text of a library without starting MPI.
ASK_PYTHON = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
ASK_LIBRARY = """
import ctypes, sys
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))
print(text.value.decode())
"""
PATIENCE_S = 20


class Choice(NamedTuple):
    """How srun starts MPI."""

    type: str = ""
    """The value of --mpi; empty: leave it to SLURM."""
    why: str = ""
    warning: str = ""
    network: str = ""
    """The value for the variable that ``slurm.NETWORK`` names; empty: leave it to MPICH."""


def choose(srun: str, search: LauncherSearch) -> Choice:
    """Return the --mpi type, why, and what it requires.

    The user's choice (--launcher-args, SLURM_MPI_TYPE) and the site's take precedence, as does SLURM's default if the
    MPI library supports it.
    """
    if any(word.startswith("--mpi") for word in (*search.site.srun_args, *search.options.launcher_args)):
        return Choice(why="--mpi as given")
    env = {**search.env, "PATH": _path(search.env)}
    configured = re.search(r"^MpiDefault\s*=\s*(\w+)", _output(["scontrol", "show", "config"], env), re.MULTILINE)
    default = configured[1] if configured else "none"
    exported = env.get("SLURM_MPI_TYPE", "")
    # In the shell of an interactive step, SLURM itself sets this variable to its default, so that is no user's choice.
    if exported and not (exported == default and "SLURM_STEP_ID" in env):
        return Choice(why=f"SLURM_MPI_TYPE={exported} was exported")
    text, source = _version(search.options.command, env, guess=default == "none")
    found = next(((match[0], types) for name, types in LIBRARIES if (match := re.search(name, text))), None)
    if not found:
        return Choice(why=f"MPI: SLURM's default, {default}; no known MPI library was found")
    library, types = re.sub(r"( version)?\s*:?\s+", " ", found[0], flags=re.IGNORECASE), found[1]
    known = {"none", *(each for _, supported in LIBRARIES for each in supported)}
    if default.partition("_v")[0] in types or default.partition("_v")[0] not in known:
        return Choice("", f"MPI: SLURM's default, {default}; {source} {library}", "", _network(default, text, env))
    listed = re.findall(r"\w+", _output([srun, "--mpi=list"], env))
    chosen = next((each for each in types if each in listed), "")
    if chosen:
        return Choice(chosen, f"--mpi={chosen}: {source} {library}", "", _network(chosen, text, env))
    lacking = f"{source} {library}, which needs --mpi={' or '.join(types)}, but `srun --mpi=list` does not list it"
    return Choice("", lacking, f"{lacking}: each rank of an MPI program will be rank 0 of 1")


def _network(kind: str, version: str, env: Mapping[str, str]) -> str:
    """Return the network library that MPICH has to use with this --mpi type; empty: any, or the user has chosen."""
    return slurm.network(version, env) if kind == "pmi2" else ""


def _path(env: Mapping[str, str]) -> str:
    """Return the PATH that the ranks will have."""
    path = env.get("PATH", os.defpath)
    return path if own_bin() in path.split(os.pathsep) else f"{own_bin()}{os.pathsep}{path}"


def _version(command: Sequence[str], env: Mapping[str, str], *, guess: bool) -> tuple[str, str]:
    """Return the version text of the MPI library that ``command`` loads (empty: none), and how it loads it.

    Args:
        command: a program that is linked with an MPI library, or a Python program, which loads mpi4py's.
        env: its environment.
        guess: whether to assume that any other program, such as a shell script, starts Python.
    """
    program, _ = find_command(command[0], env["PATH"]) if command else ("", "")
    linked = re.search(r"=> (\S*/libmpi\S*)", _output(["ldd", program], env)) if program else None
    if linked:
        return _output([sys.executable, "-c", ASK_LIBRARY, linked[1]], env), f"{command[0]} is linked with"
    python = program if os.path.basename(program).startswith("python") else _interpreter(program)
    if not python and guess:
        python = "python"
    return (_output([python, "-c", ASK_PYTHON], env) if python else ""), f"{os.path.basename(python)} loads"


def _interpreter(program: str) -> str:
    """Return the Python that runs the script ``program``; empty: it is not a Python script."""
    try:
        with open(program, "rb") as file:
            first = file.readline(1000).decode(errors="replace").split()
    except OSError:
        return ""
    return first[-1].removeprefix("#!") if first and first[0].startswith("#!") and "python" in first[-1] else ""


def _output(words: Sequence[str], env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words,
            env=dict(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr  # some versions of srun print to stderr
