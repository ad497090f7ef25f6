"""``launch --stacks RUN``: ask the ranks of a running job for their stacks, from any host that sees the job's files."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from wordrun.common import stack_requests
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.files import read_json

# Ranks look for requests at least this often [s], and wait for each other's answers equally long.
PATIENCE_S = 90.0


def main(run: str, records: str) -> int:
    """Print the stacks of the ranks of ``run``.

    Args:
        run: a run directory, the path of a launch.json, or a run ID.
        records: the folder of the records of launches.

    Raises:
        UserError: there is no such run, the run has ended, or no rank answers.
    """
    folder = _folder(run, records)
    try:
        name = stack_requests.request(folder)
    except OSError as error:
        raise ConfigError(f"--stacks {run}: cannot write to {folder}: {error.strerror}") from None
    deadline = time.monotonic() + PATIENCE_S
    while read_json(folder / stack_requests.REQUEST).get("id") == name:
        if time.monotonic() > deadline:
            stack_requests.withdraw(folder, name)
            raise UserError(
                f"--stacks {run}: no rank has answered in {PATIENCE_S:g} s: the job has ended, or it runs a "
                "program without wordrun that was not started by launch --hang; after SIGQUIT, its launch shows where "
                "the ranks are by py-spy (pip install 'wordrun[hang]')",
                page="hangs.md#a-hang",
            )
        time.sleep(0.1)
    found = max(folder.glob("*-*.txt"), key=lambda path: path.stat().st_mtime)
    sys.stdout.write(found.read_text(encoding="utf-8"))
    print(f"({found})")
    return 0


def _folder(run: str, records: str) -> Path:
    """Return the folder in which the ranks of a run report."""
    path = Path(run).expanduser()
    if path.is_dir():
        record, folder = read_json(path / "launch.json"), path.resolve() / "failures"
        state = str(read_json(path / "run.json").get("exit_reason", ""))
        if not record and not state:
            raise ConfigError(f"--stacks {run} is not a run directory: it has neither a run.json nor a launch.json")
    else:
        file = path if path.is_file() else Path(records) / f"{run}.json"
        record, folder, state = read_json(file), stack_requests.folder_of(str(file)), ""
        if not record:
            raise ConfigError(f"--stacks {run} should be a run directory, a launch.json or the ID of a run")
    if record.get("end") or state not in ("", "running"):
        raise UserError(f"--stacks {run}: it has ended ({record.get('end') or state})")
    return folder
