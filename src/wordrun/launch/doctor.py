"""``launch --doctor``: run a probe on all ranks, and report problems with their remedies."""

from __future__ import annotations

import glob
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from wordrun.common.network import is_loopback
from wordrun.launch import site_files
from wordrun.launch.environment import is_stale
from wordrun.launch.job import short
from wordrun.launch.job_script import inner
from wordrun.launch.launchers.base import NoLauncherError
from wordrun.launch.options import Options
from wordrun.launch.plan import LaunchPlan, make_plan
from wordrun.launch.rank_starter import by_launcher
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import UNKNOWN, Site, numbers

PREFIX = "wordrun-probe:"
"""Prefix of the line that each rank prints."""
PROBE_S = 180
# If importing torch takes longer, the likely cause is the disk that holds the environment.
SLOW_IMPORT_S = 20.0
# A Unix socket's path may have 107 characters, of which about 50 follow TMPDIR.
LONG_TMPDIR = 60
# What test_dist --bench has measured, relative to the working directory; the names sort by time.
MEASURED = "outputs/bandwidth/*/bandwidth.json"
# Messages of 4 MB between two ranks do not saturate an adapter; below this share, it is faulty or not used.
SLOW_SHARE = 0.3
# A finding names this many ranks or hosts.
MOST_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: str
    """ok, warning or wrong."""
    found: str
    remedy: str = ""


def main(options: Options) -> int:
    """Run the checks, print the findings, and return 1 if something is wrong."""
    command = (sys.executable, "-m", "wordrun.commands.probe", PREFIX)
    probe = replace(
        by_launcher(options), command=command, doctor=False, json=False, idle_timeout=None, walltime_margin=None
    )
    try:
        plan = make_plan(probe)
    except NoLauncherError as error:
        found, _, remedy = str(error).partition("\n  remedy: ")
        return _report([Finding("launcher", "wrong", found, remedy)], options)
    words = [sys.executable, "-m", "wordrun.launch", *inner(probe, SCHEDULERS[plan.job.scheduler])[1:]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
        output, errors, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, errors, status = _text(late.stdout), _text(late.stderr), 124
    ranks = [json.loads(line.partition(PREFIX)[2]) for line in output.splitlines() if PREFIX in line]
    known, _ = site_files.find(options.site, socket.gethostname(), os.environ)
    findings = [
        *of_machine(plan, os.environ, known),
        *of_ranks(plan, ranks, status, errors, known),
        *of_network(plan, known),
    ]
    return _report(findings, options)


def _report(findings: Sequence[Finding], options: Options) -> int:
    """Print the findings; return 1 if something is wrong."""
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.state == "wrong" for finding in findings) else 0


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _check(check: str, wrong: str, remedy: str, ok: str, state: str = "wrong") -> Finding:
    """Return a finding: ``wrong`` with its remedy or, if that is empty, ``ok``."""
    return Finding(check, state, wrong, remedy) if wrong else Finding(check, "ok", ok)


def of_machine(plan: LaunchPlan, env: Mapping[str, str], known: Site = UNKNOWN) -> list[Finding]:
    """Return the findings that need no ranks."""
    stale = " ".join(sorted(name for name in env if is_stale(name)))
    left = f"left over from another launcher: {stale}" if stale else ""
    remedy = f"launch removes them; without launch: unset {stale}"
    findings = [
        Finding("site", "ok", f"{plan.site.name or 'unknown'}, scheduler {plan.job.scheduler} {plan.job.id}".strip()),
        Finding("launcher", "ok", f"{plan.launcher.name} {plan.launcher.path} ({plan.launcher.why})"),
        _check("variables", left, remedy, "none left over from another launcher", "warning"),
    ]
    if known.internet_access:
        findings.append(_internet(plan, env, known))
    scratch = plan.env.get("TMPDIR") or env.get("TMPDIR") or "/tmp"
    for name, folder in (("run directory", plan.decided.cwd), ("TMPDIR", scratch)):
        wrong = "" if os.access(folder, os.W_OK) else f"cannot write to {folder}"
        remedy = "launch from another folder, or export TMPDIR"
        findings.append(_check(name, wrong, remedy, f"{folder} is writable"))
    if len(scratch) > LONG_TMPDIR and findings[-1].state == "ok":
        found = f"{scratch} has {len(scratch)} characters; paths of sockets in it may be too long"
        findings[-1] = Finding("TMPDIR", "warning", found, "export TMPDIR=/tmp")
    return findings


def _internet(plan: LaunchPlan, env: Mapping[str, str], known: Site) -> Finding:
    mode = plan.env.get("WANDB_MODE", env.get("WANDB_MODE", ""))
    if not known.internet:
        wrong = "" if mode in ("offline", "disabled") else f"{known.internet_access}, but WANDB_MODE={mode}"
        return _check(
            "internet", wrong, "unset WANDB_MODE: launch then sets it to offline", known.internet_access, "warning"
        )
    missing = [name for name in known.proxies if not plan.env.get(name, env.get(name))]
    are = "are" if missing[1:] else "is"
    wrong = f"{known.internet_access}, but {', '.join(missing)} {are} empty" if missing else ""
    remedy = f"unset {' '.join(missing)}, so that launch sets the site's"
    return _check("internet", wrong, remedy, known.internet_access, "warning")


def of_network(plan: LaunchPlan, known: Site = UNKNOWN) -> list[Finding]:
    """Return what the newest bandwidth.json says about this job's nodes.

    Devices' messages are compared with the network in the site's file. gloo's, between CPUs, do not use it: the nodes
    are compared with each other.
    """
    if len(plan.hosts) < 2:
        return []
    file, device, medians = _measured(plan)
    on_cpus = device.startswith("cpu")
    if not medians or (known.network is None and not on_cpus):
        unknown = "not measured between these nodes: to measure, run launch python -m wordrun.test_dist --bench"
        return [Finding("bandwidth", "ok", unknown)] if known.network else []
    expected = statistics.median(medians.values()) if on_cpus or known.network is None else known.network
    slow = [host for host in sorted(medians, key=lambda host: medians[host]) if medians[host] < SLOW_SHARE * expected]
    named = ", ".join(f"{host} {medians[host]:.3g} GB/s" for host in slow[:4])
    more = f" and {len(slow) - 4} more nodes" if len(slow) > 4 else ""
    overall = f"median {expected:.3g} GB/s (gloo)" if on_cpus else f"{known.name} expects {expected:g} GB/s per device"
    wrong = f"slow: {named}{more}; {overall} ({file})" if slow else ""
    few = "exclude them with --hostfile, and report them to the site"
    all_ = "check that the fast network is used (NCCL_DEBUG=INFO; the site's NCCL_SOCKET_IFNAME, FI_PROVIDER)"
    ok = f"{min(medians.values()):.3g} to {max(medians.values()):.3g} GB/s between nodes; {overall}"
    return [_check("bandwidth", wrong, all_ if len(slow) == len(medians) else few, ok, "warning")]


def _measured(plan: LaunchPlan) -> tuple[str, str, dict[str, float]]:
    """Return the newest bandwidth.json, its device, and the median GB/s between each of this job's nodes and others."""
    files = sorted(glob.glob(os.path.join(glob.escape(plan.decided.cwd), MEASURED)))
    here = {short(host) for host in plan.hosts}
    by_host: dict[str, list[float]] = {}
    try:
        with open(files[-1]) as file:
            measured = json.load(file)
        for pair in measured["pairs"]:
            for host in here & set(map(short, pair["hosts"])):
                by_host.setdefault(host, []).append(float(pair["gb_per_s"]))
        device = str(measured["device"])
    except (IndexError, OSError, ValueError, KeyError, TypeError):  # none, or one that is damaged
        return "", "", {}
    return files[-1], device, {host: statistics.median(speeds) for host, speeds in by_host.items()}


def of_ranks(
    plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]], status: int, errors: str, known: Site = UNKNOWN
) -> list[Finding]:
    """Return the findings in the probe's output.

    Args:
        plan: how the probe was started.
        ranks: the parsed lines, one per rank that answered.
        status: exit status of launch.
        errors: launch's stderr.
        known: the site.
    """
    count = plan.ranks.np
    if len(ranks) < count or status:
        missing = sorted({*range(count)} - {rank.get("rank") for rank in ranks})
        last = " | ".join(errors.strip().splitlines()[-3:])
        found = f"{len(ranks)} of {count} ranks answered, missing ranks {missing[:8]}; exit status {status}: {last}"
        remedy = "run the command of `launch --dry-run true` by hand, starting with one rank (-n 1)"
        return [Finding("ranks", "wrong", found, remedy)]
    hosts = len({rank["host"] for rank in ranks})
    answered = {1: "the rank", 2: "both ranks"}.get(count, f"all {count} ranks")
    findings = [Finding("ranks", "ok", f"{answered} answered ({hosts} host{'s' * (hosts > 1)})")]
    problems = dict.fromkeys(text for rank in ranks for text in rank["problems"])
    findings += [Finding("ranks", "wrong", problem) for problem in problems]
    if not all("unreached" in rank for rank in ranks):  # some ranks could not identify themselves and stopped early
        return findings
    slowest = max(rank["torch_s"] for rank in ranks)
    slow = f"{slowest:g} s on the slowest rank"
    remedy = "copy the Python environment to node-local disk (docs/launch.md#slow-imports)"
    return [
        *findings,
        _mpi(plan, ranks),
        _address(plan, ranks),
        _sockets(plan, ranks),
        *_all_reduce(plan, ranks),
        _cores(plan, ranks),
        _threads(ranks),
        _devices(plan, ranks, known),
        *_order(plan, ranks, known),
        _check("import torch", slow if slowest > SLOW_IMPORT_S else "", remedy, slow, "warning"),
        *(Finding("W&B", "ok", f"would record {rank['wandb']}") for rank in ranks if "wandb" in rank),
    ]


def _mpi(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    sizes, count, launcher = {rank["mpi_size"] for rank in ranks}, plan.ranks.np, plan.launcher.name
    if sizes == {None}:
        unused = next((rank["mpi_unused"] for rank in ranks if rank["mpi_unused"]), "")
        wrong = f"{launcher} does not start {unused}: each rank of an MPI program is rank 0 of 1" if unused else ""
        ok = "a single rank needs none" if unused else "not used: no MPI library found"
        return _check("MPI", wrong if count > 1 else "", plan.launcher.mpi_remedy, ok, "warning")
    wrong = "" if sizes == {count} else f"sees {sorted(map(str, sizes))} where {launcher} started {count}"
    remedy = (
        f"{launcher} and the MPI library that mpi4py loads do not match: {plan.launcher.mpi_remedy}; or use the "
        "library's own mpiexec, or rebuild mpi4py"
    )
    return _check("MPI", wrong, remedy, f"sees {count} ranks, as many as {launcher} started")


def _address(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    unmet = [f"rank {rank['rank']} on {rank['host']} {rank['meets']}" for rank in ranks if rank.get("meets")]
    remedy = "set --env MASTER_ADDR=ADDRESS to an address of the first host that the other hosts can reach"
    ok = f"can connect to {plan.env['MASTER_ADDR']}:{plan.env['MASTER_PORT']}"
    return _check("address", "; ".join(unmet[:3]), remedy, ok)


def _sockets(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    unreached = [text for rank in ranks for text in rank["unreached"]]
    hosts = len(plan.hosts)
    wrong = f"rank 0 cannot connect to {'; '.join(unreached[:3])}" if unreached else ""
    another = "choose another with --env GLOO_SOCKET_IFNAME=NAME (and NCCL_SOCKET_IFNAME)"
    remedy = f"ports between the hosts are closed on this network: {another}, or ask the site which ports are open"
    ok = f"every host can connect to rank 0's host, and back ({hosts} hosts)" if hosts > 1 else "one host"
    return _check("sockets", wrong, remedy, ok)


def _all_reduce(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return what came of an all-reduce in a process group like that of training; nothing if there was none."""
    done = sorted((rank for rank in ranks if "all_reduce" in rank), key=lambda rank: int(rank["rank"]))
    if not done:
        return []
    failed = [f"rank {rank['rank']} on {rank['host']}: {rank['all_reduce']}" for rank in done if rank["all_reduce"]]
    several = len({rank["host"] for rank in ranks}) > 1
    loopback = {rank["host"]: rank["own_address"] for rank in done if several and is_loopback(rank["own_address"])}
    used = {rank["host"]: rank["interface"] for rank in done if several and rank["interface"]}
    resolves = [f"{host} resolves to {address} on itself" for host, address in loopback.items()]
    gloo = [f"gloo uses {', '.join([f'{name} on {host}' for host, name in used.items()][:MOST_NAMED])}"] * bool(used)
    found = "; ".join([*failed[:MOST_NAMED], *resolves[:MOST_NAMED], *gloo])
    lines = (f"that begins with {address} on {host}" for host, address in loopback.items())
    remedies = [f"mend the line of /etc/hosts {', and the one '.join(islice(lines, MOST_NAMED))}"] * bool(loopback)
    if failed:
        remedies.append(
            "choose the interface towards the other hosts: --env GLOO_SOCKET_IFNAME=NAME, or NCCL_SOCKET_IFNAME"
        )
        return [Finding("all-reduce", "wrong", found, "; or ".join(remedies))]
    if loopback:
        return [Finding("all-reduce", "warning", f"{found}; programs without wordrun may use lo", remedies[0])]
    return [Finding("all-reduce", "ok", "; ".join([f"the sum over {plan.ranks.np} ranks is right", *gloo]))]


def _cores(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]]) -> Finding:
    least = min(rank["cores"] for rank in ranks)
    have = min(plan.job.threads[: len(plan.hosts)]) // plan.ranks.ppn
    wrong = f"each rank is limited to 1 core, although {have} per rank are available" if least == 1 < have else ""
    remedy = ": ".join(filter(None, (plan.launcher.cores_remedy, "see the launcher's arguments in launch --dry-run")))
    ok = f"{least}, shared by {plan.ranks.ppn} ranks" if least > have else f"{least} per rank"
    return _check("cores", wrong, remedy, ok)


def _threads(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    many = [rank for rank in ranks if (rank["threads"] or "").isdigit() and int(rank["threads"]) > rank["cores"]]
    wrong = f"OMP_NUM_THREADS={many[0]['threads']} on {many[0]['cores']} cores per rank" if many else ""
    remedy = "unset OMP_NUM_THREADS: launch sets it to the cores per rank"
    return _check("threads", wrong, remedy, f"OMP_NUM_THREADS={ranks[0]['threads']}", "warning")


def _devices(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]], known: Site) -> Finding:
    if plan.devices and not any(rank["devices"] for rank in ranks):
        return _unseen(plan, ranks[0], known)
    for rank in ranks:
        count, sharing = rank["devices"], rank.get("local_size", 1)
        if 1 < count < sharing:
            found = f"{sharing} ranks share {count} devices on {rank['host']}"
            return Finding("devices", "warning", found, f"use --ppn {count}")
    seen = sorted({rank["devices"] for rank in ranks})
    wrong = f"torch sees {seen} devices on different ranks" if len(seen) > 1 else ""
    remedy = "a node has lost a device, or the launcher assigns them unevenly: exclude that node with --hostfile"
    ok = f"torch sees {seen[0]} on each rank" if seen[0] else "none: the ranks run on CPUs"
    return _check("devices", wrong, remedy, ok)


def _unseen(plan: LaunchPlan, rank: Mapping[str, Any], known: Site) -> Finding:
    """Return the finding about ranks that see no device, although launch has counted some."""
    counted = f"launch counted {plan.devices} on each node ({plan.job.reasons.get('devices', 'counted')})"
    if rank.get("hidden"):
        found = f"{rank['hidden']} hides the devices from the ranks: {counted}"
        return Finding("devices", "warning", found, "leave it out, unless the ranks should run on CPUs")
    modules = f" of the site's modules ({'; '.join(known.modules)})" if known.modules else ""
    loaded = f", such as that{modules}" if modules else ""
    remedy = (
        f"use a torch built for the device{loaded}, and a driver as new as it needs; if the job itself has none, "
        "request them; to train on CPUs, train.device=cpu"
    )
    return Finding("devices", "wrong", f"none: {rank.get('torch', 'torch')} sees no device, but {counted}", remedy)


def _order(plan: LaunchPlan, ranks: Sequence[Mapping[str, Any]], known: Site) -> list[Finding]:
    """Check that each rank has its own device, and at least one of the cores that the site lists for it."""
    owners: dict[tuple[str, str], int] = {}
    near = known.cores_near_device
    # The numbers of a core's two hardware threads differ by half the total.
    half = known.cores // 2 if known.cores else sys.maxsize
    for rank in ranks:
        where = f"rank {rank['rank']} on {rank['host']}"
        name, device = rank.get("device_id") or rank.get("device"), rank.get("device")
        if name is not None and rank["local_size"] <= min(plan.job.devices):
            owner = owners.setdefault((rank["host"], str(name)), rank["rank"])
            if owner != rank["rank"]:
                found = f"{where} uses the same device as rank {owner}: {name}"
                how = f" ({plan.launcher.devices_remedy})" * bool(plan.launcher.devices_remedy)
                remedy = f"let each rank see all devices of its node{how}, or one of its own"
                return [Finding("device order", "wrong", found, remedy)]
        bound = {core % half for core in rank["affinity"]}
        if device is not None and device < len(near) and bound and not bound & numbers(near[device]):
            found = f"{where} uses device {device}, next to cores {near[device]}, but is bound to none of them"
            remedy = "leave --cpu-bind out, and launch binds each rank to the cores next to its device"
            return [Finding("device order", "wrong", found, remedy)]
    ok = "each rank has its own" + (", next to its cores" if near else "")
    return [Finding("device order", "ok", ok)] if owners else []


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colors = {"ok": "green", "warning": "yellow", "wrong": "red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        state = f"[{colors[finding.state]}]{finding.state}[/]"
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        table.add_row(state, finding.check, escape(f"{finding.found}{remedy}"))
    Console(highlight=False).print(table)
