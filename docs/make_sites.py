"""Write the parts of docs/sites/*.md that follow from the site files: commands to type, and what wordrun knows.

python docs/make_sites.py

The rest of each page is written by hand: a test checks that every site has a page, and that the parts are current.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from wordrun.launch import site_files
from wordrun.launch.parser import parse
from wordrun.launch.schedulers import SCHEDULERS
from wordrun.launch.site import Site

PAGES = Path(__file__).with_name("sites")
QUEUES = {
    "baskerville": "QOS",
    "sophia": "by-node",
    "perlmutter": "debug",
    "engaging": "mit_normal_gpu",
    "juwels_booster": "develbooster",
}
"""The queue of the page's first job, where it is not the first that the site's file names."""
INTERACTIVE = {"perlmutter": "interactive"}
"""The queue of interactive jobs, where it is another."""
TORCH = {
    "aurora": "frameworks/2025.3.1 has torch 2.10 for XPU, with the backend xccl",
    "baskerville": "the module has torch 2.1, which wordrun does not support, so pip installs a newer one",
    "crux": "no module has torch, so pip installs one for CPUs",
    "engaging": "the module has no torch, so pip installs it",
    "frontier": "no module has torch, so the lines above install it for ROCm before wordrun",
    "juwels_booster": "the site's is older than wordrun supports, so pip installs one, on a login node",
    "perlmutter": "the module has torch 2.8",
    "polaris": "conda/2025-09-25 has torch 2.8 for CUDA 12.9",
}
"""Which torch the site's documentation names, where it does."""
FIRST = {
    "frontier": (
        "python3 -m venv .venv-frontier && . .venv-frontier/bin/activate",
        "pip install torch==2.10.0 --index-url https://download.pytorch.org/whl/rocm7.1  # before wordrun",
        "pip install --no-binary=mpi4py --no-cache-dir -e .",
    )
}
"""What to type after the modules, where these have no torch and PyPI's is for other devices."""
BUILD_IN_A_JOB = ("crux", "sophia")
"""Sites that ask their users to build software on compute nodes."""
BEGIN, END = "<!-- From the site's file, by docs/make_sites.py: {} -->", "<!-- end -->"


def render(site: Site, page: str) -> str:
    """Return the page of a site with its generated parts replaced."""
    for part, text in (("commands", commands(site)), ("facts", facts(site))):
        begin = BEGIN.format(part)
        if page.count(begin) != 1:
            raise ValueError(f"docs/sites/{site.name}.md lacks the line {begin}")
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n\n{text}\n{END}{rest.partition(END)[2]}"
    return page


def first_job(site: Site, *command: str) -> list[str]:
    """Return the words that submit a command as the first job."""
    queue = QUEUES.get(site.name) or next(iter(site.queues), "")
    words = ["launch", "--submit", "-N", "2", "--walltime", "0:30:00"]
    words += ["--queue", queue] if queue else []
    words += ["--account", "PROJECT"] if site.submit.get("account_needed") else []
    words += ["--gpus", "1"] if site.count_devices and site.queue(queue).get("device_per_rank") else []
    words += [] if on_login_nodes(site) else ["--site", site.name]
    return [*words, "--", *command]


def on_login_nodes(site: Site) -> bool:
    """Say whether the site is recognized before there is a job."""
    before = [name for name in site.recognise.get("env", {}) if not name.startswith(("PBS_", "SLURM_"))]
    return bool(before) or bool(re.search("login|uan", site.recognise.get("hosts", "")))


def commands(site: Site) -> str:
    """Return what to type between the login and the first job."""
    lines = ["git clone <this repository> wordrun && cd wordrun"]
    if site.name in BUILD_IN_A_JOB or not on_login_nodes(site):
        asked = (
            "the site asks users to build software"
            if on_login_nodes(site)
            else "the login nodes are not recognized, so install"
        )
        proxies = [f"export {name}={shlex.quote(value)}" for name, value in site.proxies.items()]
        lines = [
            f"# {asked} on a node of a job",
            interactive(site),
            *proxies,
            *lines,
        ]
    lines += [*site.modules, *FIRST[site.name]] if site.name in FIRST else []
    loads = " and ".join(f"`{line}`" for line in site.modules) or "no module command"
    installed = f"runs {loads}, and creates `.venv-{site.name}`"
    if site.name in FIRST:
        installed = "uses the active environment, and checks it"
    torch = TORCH.get(site.name, "`wordrun --version` prints the version and what it is built for")
    check = first_job(site, "python", "-m", "wordrun.test_dist")
    train = first_job(site, "python", "-m", "wordrun", "data=sample", "train=smoke", "train.backend=FSDP")
    shown = "\n".join([*lines, "source bin/setup.sh && setup_python && setup_job", "wordrun --version"])
    says = ("the job script, printed", "the same job: ranks and collectives", "a short training run")
    dry, checks, training = (
        f"# {what}\n" + shlex.join([*words[:2], *extra, *words[2:]]).replace(" -- ", " \\\n  -- ")
        for what, words, extra in zip(says, (check, check, train), (["--dry-run"], [], []), strict=True)
    )
    shell = f"\nA shell on a node, in an interactive job:\n\n```console\n{interactive(site)}\n```\n"
    if interactive(site) in lines:  # shown above
        shell = ""
    queue = check[check.index("--queue") + 1] if "--queue" in check else ""
    between = ""
    if site.queue(queue).get("jobs") == 1:
        between = f"```\n\nWhen that job has ended (`{queue}` takes one job per user at a time):\n\n```console\n"
    return (
        f"```console\n{shown}\n```\n\n`setup_python` {installed}. torch: {torch}.\n\n"
        f"```console\n{dry}\n{checks}\n{between}{training}\n```\n{shell}"
    )


def interactive(site: Site) -> str:
    """Return the command that opens a shell on a compute node, with what a submitted job of one node would request."""
    words = first_job(site)[1:-1]
    words[words.index("-N") + 1] = "1"
    if "--queue" in words and site.name in INTERACTIVE:
        words[words.index("--queue") + 1] = INTERACTIVE[site.name]
    asked = SCHEDULERS[site.scheduler].directives(parse([*words, "--", "wordrun"]), site)
    # What concerns the script's name, output and restarts is left out.
    unused = ("--job-name", "--requeue", "--open-mode", "--output", "--signal", "-N ", "-j ", "-r ")
    return " ".join(
        [
            {"slurm": "salloc", "pbs": "qsub -I"}[site.scheduler],
            *(word for word in asked if not word.startswith(unused)),
        ]
    )


def facts(site: Site) -> str:
    """Return tables of what the site's file says."""
    rows = "".join(f"| {name} | {value} |\n" for name, value in knowledge(site))
    text = f"| fact | value |\n|---|---|\n{rows}"
    if site.env:
        rows = "".join(f"| `{name}` | `{value}` | {why} |\n" for name, (value, why) in site.env.items())
        text += "\nVariables that `launch` sets for the ranks, unless you export your own:\n\n"
        text += f"| variable | value | reason |\n|---|---|---|\n{rows}"
    if site.unset:
        rows = "".join(f"| `{name}` | {why} |\n" for name, why in site.unset.items())
        text += f"\nVariables that `launch` keeps from the launcher:\n\n| variable | reason |\n|---|---|\n{rows}"
    if site.queues:
        rows = "".join(f"| `{name}` | {limits(site, name)} |\n" for name in site.queues)
        text += f"\nQueues, and the limits that `launch --submit` checks:\n\n| queue | limits |\n|---|---|\n{rows}"
    return text


def knowledge(site: Site) -> Iterator[tuple[str, str]]:
    """Yield rows of the table of facts."""
    patterns = [f"host name `{cell(site.recognise['hosts'])}`"] if "hosts" in site.recognise else []
    patterns += [f"`{name}` with `{cell(value)}`" for name, value in site.recognise.get("env", {}).items()]
    yield "recognized by", ", or ".join(patterns)
    paths = f" at {', '.join(f'`{path}`' for path in site.launcher_paths)}" if site.launcher_paths else ""
    yield "scheduler and launcher", f"{site.scheduler}, {site.launcher}{paths}"
    if site.device:
        count = "counted in the job" if site.count_devices else "one rank each"
        yield "devices per node", f"{site.devices} x `{site.device}`, {count}" if site.devices else "none"
    elif site.count_devices:
        yield "devices per node", "counted in the job"
    if site.ranks_per_node:
        yield "ranks per node", str(site.ranks_per_node)
    if site.cores:
        yield "CPUs per node for ranks, unless the job says", str(site.cores)
    if site.cores_near_device:
        yield "cores of each device's rank", " ".join(f"`{cores}`" for cores in site.cores_near_device)
    if site.srun_args:
        yield "srun also gets", " ".join(f"`{word}`" for word in site.srun_args)
    if site.master_addr != "{host}":
        yield "name on the fast network", f"`{site.master_addr}`"
    if site.network:
        yield "network per device, for `launch --doctor`", f"{site.network:g} GB/s"
    yield "modules", ", ".join(f"`{line}`" for line in site.modules) or "none"
    yield "internet on compute nodes", "no: W&B records offline" if not site.internet else site.internet_access or "yes"
    if "filesystems" in site.submit:
        yield "file systems that jobs request", f"`{site.submit['filesystems']}`; `--filesystems` names others"
    needed = [
        option for key, option in (("account_needed", "--account"), ("queue_needed", "--queue")) if site.submit.get(key)
    ]
    if needed:
        yield "needed to submit", " and ".join(f"`{option}`" for option in needed)


def limits(site: Site, name: str) -> str:
    """Return a queue's limits in words."""
    queue, words = site.queues[name], []
    if "nodes" in queue:
        least, most = queue["nodes"]
        words.append(f"{least} to {most} nodes" if most > 1 else "1 node")
    hours = queue.get("hours")
    if isinstance(hours, dict):
        words.append(", ".join(f"up to {nodes} nodes {most} h" for nodes, most in hours.items()))
    elif hours:
        words.append(f"{hours} h")
    if "jobs" in queue:
        words.append(f"{queue['jobs']} job{'s' * (queue['jobs'] > 1)} per user, queued or running")
    words += ["the default"] if name == site.default_queue else []
    words += ["preempted jobs run again"] if queue.get("rerunnable") else []
    words += ["devices are requested one by one"] if queue.get("device_per_rank") else []
    return ", ".join(words) or "none known"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|")


def sites() -> dict[str, Site]:
    """Return wordrun's own sites by name."""
    return {path.stem: site_files.load(str(path)) for path in sorted(Path(site_files.OWN).glob("*.yaml"))}


if __name__ == "__main__":
    for name, site in sites().items():
        page = PAGES / f"{name}.md"
        page.write_text(render(site, page.read_text(encoding="utf-8")), encoding="utf-8")
