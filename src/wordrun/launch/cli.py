"""``launch [options] [--] COMMAND...``: read the options, decide, and run, print or refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wordrun.errors import REQUEUE, ConfigError, UserError
from wordrun.launch.options import USAGE, Options, help_text, parse

if TYPE_CHECKING:
    from wordrun.launch.command import Decided, Plan, Ranks
    from wordrun.launch.identity import Identity
    from wordrun.launch.job import Job
    from wordrun.launch.launcher import Launcher
    from wordrun.launch.site import Site

# After this long ranks have met, and a port that is taken is their program's affair.
MEETING_S = 600.0


class CommandError(UserError):
    """The command cannot be started."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``launch`` with the words ``argv`` (default: the command line's) and return its exit status."""
    try:
        return _launch(parse(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"launch: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before anything was started
        return 130
    except BrokenPipeError:  # launch --help | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _launch(options: Options) -> int:
    import wordrun

    if options.help:
        print(help_text())
        return 0
    if options.version:
        print(f"launch (wordrun) {wordrun.__version__}")
        return 0
    if not (options.command or options.info or options.doctor):
        print(f"{USAGE}\n(launch --help says more)", file=sys.stderr)
        return 2
    if options.info:
        return _info(options)
    if options.doctor:
        from wordrun.launch import doctor

        return doctor.main(options)

    if options.submit:
        return _submit(options)
    plan = make_plan(options)
    if options.dry_run:
        from wordrun.launch import show

        print(show.dry_run(plan, as_json=options.json))
        return 0
    return _run(options, plan)


def _run(options: Options, plan: Plan) -> int:
    """Run the plan, once more with another port, and without the hosts that failed as often as --retries allows."""
    import time

    from wordrun.launch.faults import classify, port_taken
    from wordrun.launch.identity import Identity
    from wordrun.launch.run import run, say

    for note in plan.job.notes:
        say(note)
    if plan.decided.resume_why:
        say(f"going on with run {plan.decided.run_id}: {plan.decided.run_why}")
    left_out: frozenset[str] = frozenset()
    retries = options.retries
    # Only launch knows another port for all ranks. One that the user named stays.
    may_move = plan.np > 1 and plan.reasons["MASTER_PORT"] != "--env"
    while True:
        last: list[str] | None = [] if retries or may_move else None
        begun = time.monotonic()
        status = run(plan, options.idle_timeout, options.walltime_margin or None, last)
        met = time.monotonic() - begun > MEETING_S
        if status not in (0, REQUEUE) and last and may_move and not met and port_taken(last, plan.decided.port):
            may_move = False
            say(f"port {plan.decided.port} was taken in the meantime: launching again with another")
        else:
            fault = classify(last or (), status)
            if fault is None or retries == 0:
                return status
            retries -= 1
            left_out |= {host.partition(".")[0] for host in fault.hosts}
            without = f" without {', '.join(sorted(left_out))}" if left_out else ""
            say(f"{fault.meaning} ({fault.line}): launching again{without}")
        try:
            same = Identity(plan.env_set["WORDRUN_RUN_ID"], "as before", "launch has started it again")
            plan = make_plan(options, left_out, same)
        except UserError as error:
            say(f"cannot launch again: {error}")
            return status


def make_plan(options: Options, left_out: frozenset[str] = frozenset(), same: Identity | None = None) -> Plan:
    """Return the Plan that ``options`` lead to on this machine.

    Args:
        options: the command line.
        left_out: short names of hosts that are not to be used.
        same: the run that is launched again; None: whatever the environment and the job say.

    Raises:
        ConfigError: the options contradict each other or the machine.
        CommandError: the command is not there or cannot be run.
    """
    from wordrun.launch import command

    env = os.environ
    job, site, ranks, chosen = _find(options, left_out)
    plan = command.build(job, options, ranks, chosen, _decide(options, job, ranks, site, same), env, site)
    _check_command(options.command[0], plan.environment(env).get("PATH", os.defpath))
    return plan


def _find(options: Options, left_out: frozenset[str] = frozenset()) -> tuple[Job, Site | None, Ranks, Launcher]:
    """Return what is there and what is asked of it."""
    from wordrun.launch import command, launcher, site
    from wordrun.launch.job import JOB_VARIABLES, find_job, hold_back, this_machine

    env = os.environ
    machine = this_machine(env)
    found, why = None, ""
    # On a machine of one's own no site would change a thing, and reading them all takes a while.
    if options.site or options.info or any(env.get(name) for name in JOB_VARIABLES.values()):
        found, why = site.find(options.site, machine.host, env)
    job = find_job(options.scheduler, env, machine, found, options.hostfile)
    job = hold_back(job, options.spare_nodes, left_out)
    if found:
        job = replace(job, reasons={**job.reasons, "site": why})
    ranks = command.decide_ranks(options, job)
    shared = [each for each in zip(job.hosts, ranks.layout, job.devices, strict=False) if each[1] > each[2] > 0]
    if shared:
        host, n, have = shared[0]
        note = f"{n} ranks share {have} device{'s' * (have > 1)} on {host} ({ranks.why}); NCCL allows one rank each"
        job = replace(job, notes=(*job.notes, note))
    return job, found, ranks, launcher.choose(options.launcher, ranks.np, env, job, found)


def _info(options: Options) -> int:
    from wordrun.launch import show
    from wordrun.launch.job import job_end

    job, known, ranks, chosen = _find(options)
    if job.ends_at is None and job.scheduler != "none":
        end = job_end(job, within_s=3)
        if end is not None:
            asked = {"pbs": "qstat", "slurm": "squeue"}[job.scheduler]
            job = replace(job, ends_at=end, reasons={**job.reasons, "time_left": asked})
    print(show.info(job, known, ranks, chosen, as_json=options.json))
    return 0


def _submit(options: Options) -> int:
    """Write a job script and submit it, or print it."""
    import json
    import shutil
    import socket
    import time

    from wordrun.launch import identity, site, submit

    known, why = site.find(options.site, socket.gethostname(), os.environ)
    here = [name for name, program in submit.SUBMITTERS.items() if shutil.which(program)]
    scheduler = options.scheduler or (known.scheduler if known else "") or next(iter(here), "")
    if scheduler not in submit.SUBMITTERS:
        raise ConfigError("--submit: no qsub or sbatch in PATH, and no --site or --scheduler says which it should be")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    setup = os.path.join(root, "bin", "setup.sh")
    place = submit.Place(os.getcwd(), sys.prefix, setup if os.path.isfile(setup) else "")
    run_id = identity.exported_id(os.environ) or identity.new_id()
    text = submit.script(options, known, scheduler, place, run_id)
    path = os.path.join("outputs", "jobs", f"{options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh")
    facts: dict[str, Any] = {
        "site": known.name if known else None,
        "site_why": why,
        "scheduler": scheduler,
        "run_id": run_id,
        "path": path,
        "script": text,
    }
    if options.dry_run:
        to_come = [f"JOB{i + 1}" for i in range(options.chain)]
        facts |= {"commands": submit.commands(scheduler, path, to_come), "jobs": []}
        print(json.dumps(facts, indent=2) if options.json else text.rstrip("\n"))
        return 0
    submit.write(path, text)
    jobs = submit.submit(scheduler, path, options.chain, os.environ)
    if options.json:
        print(json.dumps({**facts, "commands": submit.commands(scheduler, path, jobs), "jobs": jobs}, indent=2))
        return 0
    print(f"submitted {' then '.join(jobs)} (site {known.name if known else 'unknown'}: {why}; script {path})")
    print(f"run {run_id}; {submit.CANCELLERS[scheduler]} {' '.join(jobs)} ends {'all of them' if jobs[1:] else 'it'}")
    return 0


def _decide(options: Options, job: Job, ranks: Ranks, site: Site | None, same: Identity | None) -> Decided:
    """Decide what all ranks must agree on."""
    import socket

    from wordrun.launch import address, identity, launcher
    from wordrun.launch.command import Decided
    from wordrun.launch.record import mask_words

    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    asked = dict(options.env)
    folder = os.path.join(os.getcwd(), "outputs", "launches")
    run = same or identity.choose(os.environ, job, mask_words(options.command), folder)
    name = identity.file_name(folder, run.run_id)
    master, why = "", ""
    if ranks.nodes > 1 and "MASTER_ADDR" not in asked:
        master, why, problem = address.decide(job.hosts, site, socket.gethostname(), address.resolve)
        if problem and not options.dry_run:
            raise ConfigError(f"{job.reasons['hosts']}: {problem}")
        why = f"{why} (NOTE: {problem})" if problem else why
    if job.scheduler != "slurm" and "MASTER_ADDR" not in asked and not options.dry_run:  # SLURM has a list of its own
        absent = address.strangers(job.hosts[: ranks.nodes], socket.gethostname(), address.is_unknown)
        if absent:
            raise ConfigError(
                f"{job.reasons['hosts']}: {', '.join(absent[:5])}{', ...' * (len(absent) > 5)} cannot be found by name "
                "from here: correct the list, or, if only the launcher knows them, name the first one's address by "
                "--env MASTER_ADDR=ADDRESS"
            )
    # Ranks on other hosts can report only through a folder that they share with this one.
    if ranks.nodes > 1 or job.scheduler != "none":
        status_dir = os.path.join(folder, f"{name}.status")
    else:
        status_dir = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-launch-{launch_id}")
    return Decided(
        launch_id=launch_id,
        run_id=run.run_id,
        run_why=run.why,
        resume_why=run.resume,
        name=name,
        port=_port(asked["MASTER_PORT"]) if "MASTER_PORT" in asked else launcher.free_port(),
        cwd=os.getcwd(),
        status_dir=status_dir,
        own_bin=launcher.own_bin(),
        master_addr=master,
        master_why=why,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        terminal=_terminal(),
    )


def _port(text: str) -> int:
    from wordrun.launch import launcher

    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(f"--env MASTER_PORT={text}: a port is a number from 1 to 65535")
    if not launcher.is_free(int(text)):
        raise ConfigError(
            f"port {text} (--env MASTER_PORT) is in use by another process, or not ours to use; "
            "leave MASTER_PORT out and launch finds a free one"
        )
    return int(text)


def _terminal() -> str:
    try:
        size = os.get_terminal_size(1)
    except OSError:
        return ""
    return f"{size.columns}x{size.lines}"


def _check_command(word: str, path: str) -> None:
    from wordrun.launch.launcher import find_command

    runnable, plain = find_command(word, path)
    if runnable:
        return
    if not plain:
        directory = " (it is a directory)" if os.path.isdir(word) else ""
        where = "no such file" if "/" in word else "in no directory of PATH"
        raise CommandError(f"{word}: command not found{directory or f': {where}'}", 127)
    if plain.endswith(".py"):
        raise CommandError(f"{word} is not an executable file; did you mean: launch python {word}", 126)
    if "/" in word:
        raise CommandError(f"{word} is not executable: chmod +x {word}", 126)
    raise CommandError(f"{word}: command not found: in no directory of PATH (there is a file {plain}; chmod +x?)", 127)
