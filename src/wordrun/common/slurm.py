"""SLURM's variables: host lists such as ``node[01-03,7]``, counts such as ``4(x2),3``, and tasks."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby, product

from wordrun.common.errors import ConfigError

ITEM = re.compile(r"((?:[^,\[\]\s]+|\[[^\[\]]*\])+)(,|$)")

# An MPICH with both networks, such as PyPI's, may use UCX. With SLURM's pmi2 it speaks PMI-1, and SLURM (22.05 to
# 26.05) reads at most 1024 bytes per line. UCX's addresses take up to 1080 bytes; then MPI_Init hangs or fails. Those
# of libfabric (ofi) take 70 bytes.
EITHER_NETWORK = r"MPICH Device:\s*ch4:(ucx[ ,]+ofi|ofi[ ,]+ucx)\b"
NETWORK = "MPIR_CVAR_CH4_NETMOD"

# Steps with these ids or higher have no tasks: extern, batch and interactive steps (slurm/slurm.h, SLURM_*_SCRIPT).
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def is_task(env: Mapping[str, str]) -> bool:
    """Return whether the process with ``env`` is a task of srun rather than a job's batch or interactive shell."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP and "SLURM_PROCID" in env


def node_name(env: Mapping[str, str]) -> str:
    """Return this machine's name: SLURM's for the node, if it says, which need not be the host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def is_restarted(env: Mapping[str, str]) -> bool:
    """Return whether SLURM has requeued the job with ``env``, and started it again."""
    return env.get("SLURM_RESTART_COUNT", "0") != "0"


def step_of(env: Mapping[str, str], separator: str = ".") -> str:
    """Return the ids of the job and of its step, as far as ``env`` has them."""
    return separator.join(env[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in env)


def hosts_of_step(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the step of the process with ``env``, in order."""
    return expand_hosts(env["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")


def cores_on_node(env: Mapping[str, str]) -> int | None:
    """Return how many cores of this node the job has; None: unknown."""
    text = env.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdigit() else None


def group_of_job(path: str) -> tuple[str, str] | None:
    """Return the job's control group and the name of the file, for the ``path`` of a file in a group below it."""
    match = re.match(r"(.*/job_\d+)/.*/([^/]+)", path)
    return (match[1], match[2]) if match else None


def task_variables(env: Mapping[str, str], rank: int, local: int, node: int, layout: Sequence[int]) -> dict[str, str]:
    """Return the variables in which srun describes a task and its step; none if it has not started this process.

    Args:
        env: this process's variables.
        rank: number of the task.
        local: its number on its node.
        node: number of the node.
        layout: number of tasks on each node.
    """
    if "SLURM_PROCID" not in env:
        return {}
    size, each = str(sum(layout)), ",".join(map(str, layout))
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), size),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
    }


def network(library: str, env: Mapping[str, str]) -> str:
    """Return the value of ``NETWORK`` that an MPI ``library`` needs with pmi2; empty: none, or ``env`` has one."""
    return "ofi" if NETWORK not in env and re.search(EITHER_NETWORK, library) else ""


def expand_hosts(text: str, name: str = "host list") -> tuple[str, ...]:
    """Expand a SLURM host list into host names, in order.

    Items are separated by commas outside brackets. Each bracket holds numbers and ranges, padded with zeros to the
    width of their lower end; several brackets in one item multiply, the rightmost changing fastest.

    Args:
        text: such as ``nid[001234-001236,001300],login1``.
        name: name of the text in error messages.

    Raises:
        ConfigError: it does not parse.
    """
    text = text.strip()
    hosts: list[str] = []
    at, comma = 0, ","
    while comma:
        item = ITEM.match(text, at)
        if item is None:
            raise ConfigError(f"{name}: {text!r} is not a host list such as node[01-03,7],login1")
        # The split alternates between names and the contents of brackets.
        texts = re.split(r"\[([^\[\]]*)\]", item[1])
        choices = [[each] if i % 2 == 0 else _numbers(each, text, name) for i, each in enumerate(texts)]
        hosts += ["".join(words) for words in product(*choices)] if len(texts) > 1 else texts
        at, comma = item.end(), item[2]
    return tuple(hosts)


def _numbers(inside: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for each in inside.split(","):
        low, dash, high = each.strip().partition("-")
        if dash and low.isdigit() and high.isdigit() and int(low) <= int(high):
            numbers += [f"{i:0{len(low)}d}" for i in range(int(low), int(high) + 1)]
        elif not dash and re.fullmatch(r"\w+", low):
            numbers.append(low)
        else:
            raise ConfigError(f"{name}: {each!r} in {text!r} is neither a number nor a range such as 01-03")
    return numbers


def expand_counts(text: str, name: str = "counts") -> list[int]:
    """Expand SLURM's counts: ``4(x2),3`` becomes ``[4, 4, 3]``.

    Raises:
        ConfigError: it does not parse.
    """
    counts: list[int] = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each.strip())
        if not match:
            raise ConfigError(f"{name}='{text}' is not a list of counts such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def compact_counts(counts: Sequence[int]) -> str:
    """Return the text that ``expand_counts`` expands."""
    runs = [(count, len([*same])) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
