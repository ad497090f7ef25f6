"""``launch [options] [--] COMMAND...``: parse the options, then run, print, probe or submit."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from wordrun.common.errors import REQUEUE, ConfigError, UserError, short_lines, with_page
from wordrun.common.version import __version__
from wordrun.launch import dry_run, record, sweeps_and_studies
from wordrun.launch.job import short
from wordrun.launch.launchers import choose
from wordrun.launch.launchers.base import NoLauncherError
from wordrun.launch.messages import say
from wordrun.launch.options import Options
from wordrun.launch.parser import help_text, parse
from wordrun.launch.plan import LaunchPlan, look_around, make_plan
from wordrun.launch.rank_starter import by_launcher
from wordrun.launch.request import Identity
from wordrun.launch.run_identity import records_folder
from wordrun.launch.schedulers import SCHEDULERS

# After this long, the ranks have met: a port in use is then one that the user's program opens.
MEETING_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``launch`` with ``argv`` (default: the command line) and return its exit status."""
    warnings = [number for number in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(number) == signal.SIG_DFL]
    for number in warnings:  # a handler is not inherited by the ranks, as ignoring would be
        signal.signal(number, lambda number, frame: None)
    try:
        return _launch(parse(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        for line in short_lines(with_page(error)):
            print(f"launch: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # before anything was started
        return 130
    except BrokenPipeError:  # launch --help | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    finally:
        for number in warnings:  # Python drops its handlers before the process ends
            signal.signal(number, signal.SIG_IGN if argv is None else signal.SIG_DFL)


def _launch(options: Options) -> int:
    if options.help:
        print(help_text(complete="all" in options.command))
        return 0
    if options.version:
        print(f"launch (wordrun) {__version__}")
        return 0
    if options.stacks is not None:
        from wordrun.launch import stacks

        return stacks.main(options.stacks, records_folder((), os.environ))
    if not (options.command or options.info or options.doctor):
        raise ConfigError(
            "COMMAND is missing, for example: launch -n 2 python train.py (launch --help lists the options)"
        )
    if options.info:
        return _info(options)
    if options.doctor and not options.submit:  # with it, the job is the doctor's
        from wordrun.launch import doctor

        return doctor.main(options)
    if options.submit:
        from wordrun.launch import submit

        return submit.main(options)
    sweeps_and_studies.reject_study_on_ranks(options)
    plan = make_plan(options)
    if options.dry_run:
        print(dry_run.dry_run(plan, as_json=options.json))
        return 0
    from wordrun.launch.retries import Progress

    progress = Progress(plan)
    status = progress.checked(_run(options, plan))
    what, _, command = record.how_to_continue(plan, status).partition("\n")
    say(what)
    if command:
        print(command, file=sys.stderr)  # without the prefix, to be pasted
    if what:
        page = "jobs.md#exit-status-75" if status == REQUEUE else "jobs.md#which-run-is-resumed"
        say(f"more: docs/{page}")
    return status


def _run(options: Options, plan: LaunchPlan) -> int:
    """Run the plan; relaunch once if the port was taken, and up to --retries times without failed hosts."""
    from wordrun.launch.lost_hosts import lost_hosts
    from wordrun.launch.retries import Retries, port_taken, reported_fault
    from wordrun.launch.run import run

    for note in plan.job.notes:
        say(note)
    if plan.decided.run.resume:
        say(f"continuing run {plan.decided.run.run_id}: {plan.decided.run.why}")
    left_out: frozenset[str] = frozenset()
    without = ""
    retries = Retries(options.retries)
    # Only launch can choose another port for all ranks; a port chosen by the user is kept.
    may_move = plan.ranks.np > 1 and plan.reasons["MASTER_PORT"] != "--env"
    while True:
        begun = time.monotonic()
        if plan.launcher.in_between:
            caveat = f" ({plan.launcher.caveat})" if plan.launcher.caveat else ""
            by = plan.starter.described(plan.ranks, f"{plan.launcher.name}{caveat}")
            say(f"starting {dry_run.size(plan)} with {by}")
        outcome = run(plan, keep_lines=bool(retries.left or may_move), retries=retries)
        status, last = outcome.status, outcome.last_lines
        met = time.monotonic() - begun > MEETING_S
        if status not in (0, REQUEUE) and may_move and not met and port_taken(last, plan.decided.port):
            may_move = False
            say(f"port {plan.decided.port} was taken in the meantime: relaunching with another port")
        elif outcome.needs_launcher:
            options = by_launcher(options)
            say(outcome.needs_launcher)
        else:
            fault = reported_fault(last, status)
            if outcome.lost_hosts and not (fault and fault.hosts):
                fault = None  # what was found out says more than what the launcher reports
            fault = fault or retries.after_kill(outcome, plan.env["WORDRUN_LAUNCH_RECORD"])
            if fault is None or retries.left == 0:
                say(retries.refusal if options.retries else "", "faults.md#what-you-set-and-what-you-lose")
                say(record.continued_without(plan, left_out) if status == 0 else "")
                return status
            retries.use_one()
            if outcome.lost_hosts and not {*plan.launcher.single} <= {*options.launcher_args}:
                # On the other hosts, SLURM reserves the CPUs of a step until it knows of the loss.
                options = replace(options, launcher_args=(*options.launcher_args, *plan.launcher.single))
            left_out |= set(map(short, fault.hosts))
            without = f" without {', '.join(sorted(left_out))}" if left_out else ""
            say(f"{fault.meaning} ({fault.line}): relaunching{without}")
        try:
            same = Identity(plan.env["WORDRUN_RUN_ID"], "as before", "relaunched")
            plan = make_plan(options, left_out, same)
            while more := lost_hosts(plan) if left_out else ():  # a spare host may have been lost before
                say(f"{', '.join(more)} cannot be reached either")
                left_out |= {*more}
                without = f" without {', '.join(sorted(left_out))}"
                plan = make_plan(options, left_out, same)
            if retries.faults:
                plan = replace(plan, env={**plan.env, "WORDRUN_FAULTS": json.dumps(retries.faults)})
        except UserError as error:
            say(f"cannot relaunch{without}: {with_page(error)}")
            return status


def _info(options: Options) -> int:
    job, site, ranks = look_around(options)
    try:
        launcher, missing = choose(options.launcher, ranks.np, os.environ, job, site, options), ""
    except NoLauncherError as error:
        launcher, missing = None, str(error)
    if job.ends_at is None:
        scheduler = SCHEDULERS[job.scheduler]
        end = scheduler.end_time(job.id, within_s=3)
        if end is not None:
            job = replace(job, ends_at=end, reasons={**job.reasons, "time_left": scheduler.end_query[0]})
    print(dry_run.info(job, site, ranks, launcher, missing, as_json=options.json))
    return 0
