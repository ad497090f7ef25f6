"""Run IDs."""

import logging
import os
import re
import time
from collections.abc import Mapping

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
