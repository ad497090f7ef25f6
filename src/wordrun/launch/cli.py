"""``launch [options] [--] COMMAND...``: read the options, decide, and run, print or refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wordrun.errors import ConfigError, UserError
from wordrun.launch.options import USAGE, Options, help_text, parse

if TYPE_CHECKING:
    from wordrun.launch.command import Decided, Plan
    from wordrun.launch.job import Job


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
    if not options.command and not options.info:
        print(f"{USAGE}\n(launch --help says more)", file=sys.stderr)
        return 2
    _refuse_what_has_no_meaning_yet(options)
    if options.info:
        return _info(options)

    plan = make_plan(options)
    if options.dry_run:
        from wordrun.launch import show

        print(show.dry_run(plan, as_json=options.json))
        return 0
    from wordrun.launch.run import run, say

    for note in plan.job.notes:
        say(note)
    return run(plan, options.idle_timeout)


def make_plan(options: Options) -> Plan:
    """Return the Plan that ``options`` lead to on this machine.

    Raises:
        ConfigError: the options contradict each other or the machine.
        CommandError: the command is not there or cannot be run.
    """
    from wordrun.launch import command, launcher
    from wordrun.launch.job import find_job

    env = os.environ
    job = find_job(options.scheduler, env)
    ranks = command.decide_ranks(options, job)
    chosen = launcher.choose(options.launcher, ranks.np, env)
    plan = command.build(job, options, ranks, chosen, _decide(options, job), env)
    _check_command(options.command[0], plan.environment(env).get("PATH", os.defpath))
    return plan


def _info(options: Options) -> int:
    from wordrun.launch import command, launcher, show
    from wordrun.launch.job import find_job

    job = find_job(options.scheduler, os.environ)
    ranks = command.decide_ranks(options, job)
    print(show.info(job, ranks, launcher.choose(options.launcher, ranks.np, os.environ), as_json=options.json))
    return 0


def _decide(options: Options, job: Job) -> Decided:
    """Decide what all ranks must agree on."""
    import socket
    import time

    from wordrun.launch import launcher
    from wordrun.launch.command import Decided

    token = os.urandom(6).hex()
    launch_id = f"{os.getpid()}-{token}"
    asked = dict(options.env).get("MASTER_PORT")
    return Decided(
        launch_id=launch_id,
        run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}",
        port=launcher.free_port() if asked is None else _port(asked),
        cwd=os.getcwd(),
        status_dir=os.path.join(os.environ.get("TMPDIR") or "/tmp", f"wordrun-launch-{launch_id}"),
        own_bin=launcher.own_bin(),
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


def _refuse_what_has_no_meaning_yet(options: Options) -> None:
    """Stop rather than ignore an option that this version only reads."""
    for name, value, what in (
        ("--hostfile", options.hostfile, "ranks are started on this machine alone"),
        ("--site", options.site, "no sites are known"),
    ):
        if value is not None:
            raise ConfigError(f"{name} {value} comes with a later version: in this one {what}; leave it out")


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
