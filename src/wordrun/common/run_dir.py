"""Run directories: the names of their files, how to recognize one, if it is in use, its checkpoints; and run IDs."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from wordrun.common.errors import ConfigError
from wordrun.common.files import why

LATEST = "outputs/latest"
"""A link to the directory of the newest run in the working directory."""
RECORD = "run.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
"""The file that every checkpoint has."""
CHECKPOINT = re.compile(r"step-(\d{8,})")
"""The name of a checkpoint's folder, with its step."""
DIED = "died"
"""``exit_reason`` in run.json of a run whose processes are gone without having said why."""


def has_run(path: Path) -> bool:
    """Return whether the folder ``path`` has a run: a checkpoint, its record or its metrics, readable or not."""
    metrics = path / METRICS
    return (
        os.path.lexists(path / RECORD)
        or any((path / CHECKPOINTS).glob("step-*"))
        or (os.path.isfile(metrics) and os.path.getsize(metrics) > 0)
    )


def find(folder: Path) -> Iterator[Path]:
    """Yield the run directories at or below ``folder``; links are not followed."""
    for root, folders, names in os.walk(folder):
        if {RECORD, METRICS, CHECKPOINTS} & {*names, *folders} and has_run(Path(root)):
            folders.clear()
            yield Path(root)
        folders.sort()


def no_run_yet(path: Path) -> str:
    """Return a message if ``path`` is the link to the newest run, and no run has started yet; else an empty string."""
    if str(path) != LATEST or os.path.lexists(path):
        return ""
    return f"{path} does not exist: no run has been started in this folder"


def in_use(path: Path) -> bool:
    """Return whether a process writes to the run directory ``path``; False if its file system has no locks."""
    try:
        file = (path / ".lock").open(encoding="utf-8")
    except OSError:
        return False
    with file:
        try:
            # Shared: it conflicts with the run's own lock, and needs no permission to write.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


def gone(run_dir: Path) -> str:
    """Return a message if the current run's directory was removed or cannot be reached; empty: it is there."""
    reason = ""
    for name in (".lock", RECORD, METRICS):  # a user may remove one of them
        try:
            os.lstat(run_dir / name)
            return ""
        except OSError as error:
            reason = why(error)
    return f"the directory {run_dir} of this run was removed, moved or became unreachable ({reason}): the run ends"


def checkpoints_in(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the step and the folder of each checkpoint of a run, oldest first; nothing in them is read."""
    try:
        names = os.listdir(run_dir / CHECKPOINTS)
    except OSError:
        return []
    steps = sorted((int(match[1]), name) for name in names if (match := CHECKPOINT.fullmatch(name)))
    return [(step, run_dir / CHECKPOINTS / name) for step, name in steps]


def locate(path: Path) -> tuple[Path, Path | None]:
    """Return the run directory that ``path`` names or is in, and the checkpoint that ``path`` names.

    Args:
        path: a run directory or its ``checkpoints``, for which the checkpoint is None, or one checkpoint.

    Raises:
        ConfigError: there is no such folder, or no checkpoint in it.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_dir():
        remedy = f"name a run directory, or one of its {CHECKPOINTS}/step-..."
        raise ConfigError(no_run_yet(path) or f"{path} is not a folder: {remedy}")
    path = path.resolve()  # latest and best are links
    if CHECKPOINT.fullmatch(path.name) or (path / MANIFEST).exists():
        return path.parent.parent if path.parent.name == CHECKPOINTS else path.parent, path
    run_dir = path.parent if path.name == CHECKPOINTS else path
    if not checkpoints_in(run_dir):
        raise ConfigError(
            f"{run_dir} contains no checkpoint: it is not a run directory, or the run ended before its first save "
            "(train.checkpoint_interval)",
            page="checkpoints.md#resuming",
        )
    return run_dir, None


OF_ONE_RUN = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "MLFLOW_RUN_ID")
"""Variables with which trackers record into one run, which exists or has this name."""


def drop_ids_of_one_run() -> None:
    """Remove ``OF_ONE_RUN`` from this process's environment with a warning: all points of a sweep would be one run."""
    if found := [name for name in OF_ONE_RUN if os.environ.pop(name, "")]:
        text = "%s ignored: the points of a sweep or a study are runs with IDs and names of their own"
        logging.getLogger("wordrun").warning(text, ", ".join(found))


def new_run_id() -> str:
    """Return a unique name for a run: the time, four random hex digits and, in a job array, the job and its index."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}{_of_array(os.environ)}"


def _of_array(env: Mapping[str, str]) -> str:
    """Return -JOB_INDEX for a member of a job array, since thousands may start in the same second; else nothing."""
    for job, index in (("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), ("PBS_JOBID", "PBS_ARRAY_INDEX")):
        number = re.match(r"\d+", env.get(job, ""))
        if number and env.get(index, "").isdecimal():
            return f"-{number[0]}_{env[index]}"
    return ""
