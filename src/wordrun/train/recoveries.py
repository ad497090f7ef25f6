"""The recoveries of a run from faults: cause, step from which it resumed, and time until the next step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wordrun.common.log import LOGGER


class Recoveries:
    """The faults of a run so far.

    Args:
        before: those already in run.json.
        step: where the run resumes.
        source: ``memory`` or ``disk``; None: it starts at step 0.
    """

    def __init__(self, before: Sequence[Mapping[str, Any]], step: int, source: str | None) -> None:
        noted = {fault.get("time") for fault in before}
        faults = json.loads(os.environ.get("WORDRUN_FAULTS", "[]"))
        self._new = [
            {**fault, "resumed_step": step, "source": source, "seconds": None}
            for fault in faults
            if fault["time"] not in noted
        ]
        self.all = [*before, *self._new]
        """Each with the keys rank, pid, cause, last_step, time, resumed_step, source and seconds, if known."""

    def complete(self) -> bool:
        """After a step, note the time since the last fault; return whether this adds anything to the record."""
        faults, self._new = self._new, []
        for fault in faults:
            fault["seconds"] = round(time.time() - fault["time"], 3)
        if faults:
            LOGGER.info("%.1f s from the fault (%s) to the next step", faults[-1]["seconds"], faults[-1]["cause"])
        return bool(faults)
