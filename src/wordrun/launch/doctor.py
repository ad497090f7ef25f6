"""``launch --doctor``: start a probe on the ranks, and say what is wrong with what they saw, with the remedy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wordrun.launch import site_files
from wordrun.launch.environment import is_stale
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan
from wordrun.launch.planner import make_plan
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN, Site, numbers
from wordrun.launch.submit import inner

MARK = "wordrun-probe:"
"""What the line of a rank begins with."""
PROBE_S = 180
# Slower than this the disk that holds the environment is the likely reason.
SLOW_IMPORT_S = 20.0
# A Unix socket's path, which is made of this and some 50 characters, may have 107.
LONG_TMPDIR = 60


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    state: str
    """ok, warning or wrong."""
    found: str
    remedy: str = ""


def main(options: Options) -> int:
    """Look, print the findings, and return 1 where something is wrong."""
    command = (sys.executable, "-m", "wordrun.probe", MARK)
    probe = replace(options, command=command, doctor=False, json=False, idle_timeout=None, walltime_margin=None)
    plan = make_plan(probe)
    words = [sys.executable, "-m", "wordrun.launch", *inner(probe, SCHEDULERS[plan.job.scheduler])[1:]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
        output, status = done.stdout, done.returncode
        errors = done.stderr
    except subprocess.TimeoutExpired as late:
        output, errors, status = _text(late.stdout), _text(late.stderr), 124
    ranks = [json.loads(line.partition(MARK)[2]) for line in output.splitlines() if MARK in line]
    known, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    findings = [*of_machine(plan, os.environ, known), *of_ranks(plan, ranks, status, errors, known)]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.state == "wrong" for finding in findings) else 0


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def of_machine(plan: LaunchPlan, env: Mapping[str, str], known: Site = UNKNOWN) -> list[Finding]:
    """Return what this process sees without the ranks, on a site that may be known."""
    findings = [
        Finding("site", "ok", f"{plan.site or 'unknown'}, scheduler {plan.job.scheduler} {plan.job.id}".strip()),
        Finding("launcher", "ok", f"{plan.launcher.name} {plan.launcher.path} ({plan.launcher.why})"),
    ]
    stale = sorted(name for name in env if is_stale(name))
    if stale:
        findings.append(
            Finding(
                "variables", "warning", f"left by an earlier launcher: {', '.join(stale)}",
                f"launch takes them away; for a bare python: unset {' '.join(stale)}",
            )
        )  # fmt: skip
    else:
        findings.append(Finding("variables", "ok", "none left by an earlier launcher"))
    if known.name:
        findings.append(_internet(plan, env, known))
    scratch = plan.env_set.get("TMPDIR") or env.get("TMPDIR") or "/tmp"
    for name, folder in (("run directory", plan.decided.cwd), ("TMPDIR", scratch)):
        if not os.access(folder, os.W_OK):
            findings.append(
                Finding(name, "wrong", f"{folder} cannot be written", "launch from another folder, or export TMPDIR")
            )
        elif name == "TMPDIR" and len(folder) > LONG_TMPDIR:
            findings.append(
                Finding(
                    name,
                    "warning",
                    f"{folder} has {len(folder)} characters; a socket's path in it may be too long",
                    "export TMPDIR=/tmp",
                )
            )
        else:
            findings.append(Finding(name, "ok", f"{folder} can be written"))
    return findings


def _internet(plan: LaunchPlan, env: Mapping[str, str], known: Site) -> Finding:
    mode = plan.env_set.get("WANDB_MODE", env.get("WANDB_MODE", ""))
    if not known.internet and mode not in ("offline", "disabled"):
        return Finding(
            "internet",
            "warning",
            f"{known.way_out}, but WANDB_MODE={mode}",
            "unset WANDB_MODE, and launch sets offline",
        )
    missing = [name for name in known.proxies if not plan.env_set.get(name, env.get(name))]
    if known.internet and missing:
        return Finding(
            "internet", "warning", f"{known.way_out}, but {', '.join(missing)} empty",
            f"unset {' '.join(missing)}, and launch sets the site's",
        )  # fmt: skip
    return Finding("internet", "ok", known.way_out)


def of_ranks(
    plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]], status: int, errors: str, known: Site = UNKNOWN
) -> list[Finding]:
    """Return what is to be said of the lines that the probe printed.

    Args:
        plan: how the probe was started.
        ranks: the lines, one for each rank that could.
        status: exit status of launch.
        errors: what it printed on stderr.
        known: the site, where it is known.
    """
    if len(ranks) < plan.np or status:
        missing = sorted({*range(plan.np)} - {rank.get("rank") for rank in ranks})
        last = " | ".join(errors.strip().splitlines()[-3:])
        return [
            Finding(
                "ranks", "wrong", f"{len(ranks)} of {plan.np} answered, missing {missing[:8]}; status {status}: {last}",
                "run the command of `launch --dry-run true` by hand, beginning with one rank (-n 1)",
            )
        ]  # fmt: skip
    hosts = len({rank["host"] for rank in ranks})
    answered = "the rank" if plan.np == 1 else "both ranks" if plan.np == 2 else f"all {plan.np} ranks"
    findings = [Finding("ranks", "ok", f"{answered} answered ({hosts} host{'s' * (hosts > 1)})")]
    for problem in dict.fromkeys(text for rank in ranks for text in rank["problems"]):
        findings.append(Finding("ranks", "wrong", problem))
    if not all("unreached" in rank for rank in ranks):  # some did not find out who they are, and looked no further
        return findings
    findings.append(_mpi(plan, ranks))
    unmet = [f"rank {rank['rank']} on {rank['host']} {rank['meets']}" for rank in ranks if rank.get("meets")]
    findings.append(
        Finding(
            "address", "wrong" if unmet else "ok",
            "; ".join(unmet[:3]) or f"a socket opens at {plan.env_set['MASTER_ADDR']}:{plan.env_set['MASTER_PORT']}",
            "--env MASTER_ADDR=ADDRESS, of the first host, on a network that the others reach" if unmet else "",
        )
    )  # fmt: skip
    findings += [
        _sockets(plan, ranks),
        _cores(plan, ranks),
        _threads(ranks),
        _devices(ranks),
        *_order(plan, ranks, known),
    ]
    slowest = max(rank["torch_s"] for rank in ranks)
    slow = slowest > SLOW_IMPORT_S
    findings.append(
        Finding(
            "import torch", "warning" if slow else "ok", f"{slowest:g} s on the slowest rank",
            "copy the environment to node-local disk, or broadcast it (sbcast, Copper)" if slow else "",
        )
    )  # fmt: skip
    modes = [rank["wandb"] for rank in ranks if "wandb" in rank]
    findings += [Finding("W&B", "ok", f"would record {mode}") for mode in modes]
    return findings


def _mpi(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    sizes = {rank["mpi_size"] for rank in ranks}
    if sizes == {None}:
        return Finding("MPI", "ok", f"not used: {plan.launcher.name} starts ranks that meet by address")
    if sizes == {plan.np}:
        return Finding("MPI", "ok", f"sees {plan.np} ranks, as {plan.launcher.name} does")
    return Finding(
        "MPI", "wrong", f"sees {sorted(map(str, sizes))} where {plan.launcher.name} started {plan.np}",
        "the launcher and the MPI library that mpi4py loads do not belong together: use the library's own mpiexec, "
        "under srun the --mpi type that it speaks (srun --mpi=list), or rebuild mpi4py",
    )  # fmt: skip


def _sockets(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    unreached = [text for rank in ranks for text in rank["unreached"]]
    if unreached:
        return Finding(
            "sockets", "wrong", f"rank 0 cannot open one to {'; '.join(unreached[:3])}",
            "ports between the hosts are closed on this network: name another by --env GLOO_SOCKET_IFNAME=NAME (and "
            "NCCL_SOCKET_IFNAME), or ask the site which ports are open",
        )  # fmt: skip
    hosts = len(plan.hosts)
    return Finding(
        "sockets", "ok", f"open from each of {hosts} hosts to rank 0's, and back" if hosts > 1 else "one host"
    )


def _cores(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    least = min(rank["cores"] for rank in ranks)
    have = min(plan.job.cores[: len(plan.hosts)]) // plan.ppn
    if least < have and least == 1:
        return Finding(
            "cores", "wrong", f"a rank may use 1 core, though there are {have} for each",
            "srun needs -c (SLURM 22.05 and later do not inherit it), Open MPI --bind-to none: see launch --dry-run",
        )  # fmt: skip
    return Finding("cores", "ok", f"{least} for a rank")


def _threads(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    crowded = [rank for rank in ranks if (rank["threads"] or "").isdigit() and int(rank["threads"]) > rank["cores"]]
    if crowded:
        return Finding(
            "threads", "warning", f"OMP_NUM_THREADS={crowded[0]['threads']} on {crowded[0]['cores']} cores of a rank",
            "unset OMP_NUM_THREADS, and launch divides the cores",
        )  # fmt: skip
    return Finding("threads", "ok", f"OMP_NUM_THREADS={ranks[0]['threads']}")


def _devices(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    crowded = [rank for rank in ranks if rank["devices"] > 1 and rank.get("local_size", 1) > rank["devices"]]
    if crowded:
        some = crowded[0]
        return Finding(
            "devices", "warning", f"{some['local_size']} ranks share {some['devices']} devices on {some['host']}",
            f"--ppn {some['devices']}",
        )  # fmt: skip
    seen = sorted({rank["devices"] for rank in ranks})
    if len(seen) > 1:
        return Finding(
            "devices", "wrong", f"torch sees {seen} devices on different ranks",
            "a node has lost one, or the launcher deals them out unevenly: leave that node out by --hostfile",
        )  # fmt: skip
    return Finding(
        "devices", "ok", f"torch sees {seen[0]} on each rank" if seen[0] else "none: the ranks compute on CPUs"
    )


def _order(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]], known: Site) -> list[Finding]:
    """Return whether each rank has a device of its own, and the cores that the site says are next to it."""
    owners: dict[tuple[str, str], int] = {}
    near = known.cores_near_device
    # Two threads of a core have numbers that differ by half of all.
    half = known.cores // 2 if known.cores else sys.maxsize
    for rank in ranks:
        where = f"rank {rank['rank']} on {rank['host']}"
        name, device = rank.get("device_id") or rank.get("device"), rank.get("device")
        if name is not None and rank["local_size"] <= min(plan.job.devices):
            owner = owners.setdefault((rank["host"], str(name)), rank["rank"])
            if owner != rank["rank"]:
                return [
                    Finding(
                        "device order", "wrong", f"{where} has the same device as rank {owner}: {name}",
                        "let each rank see all devices of its node (srun: --gpus-per-node with --gpu-bind=none), or "
                        "one of its own",
                    )
                ]  # fmt: skip
        bound = {core % half for core in rank["affinity"]}
        if device is not None and device < len(near) and bound and not bound & numbers(near[device]):
            return [
                Finding(
                    "device order", "wrong",
                    f"{where} has device {device}, which is next to cores {near[device]}, but not one of these cores",
                    "leave --cpu-bind out, and launch binds each rank to the cores next to its device",
                )
            ]  # fmt: skip
    if not owners:
        return []
    return [Finding("device order", "ok", "each rank has its own" + (", next to its cores" if near else ""))]


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "warning": "yellow", "wrong": "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(
            f"[{colours[finding.state]}]{finding.state}[/]", finding.check, escape(f"{finding.found}{remedy}")
        )
    Console(highlight=False).print(table)
