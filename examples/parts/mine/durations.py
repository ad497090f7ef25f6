import time
from dataclasses import dataclass
from itertools import pairwise

from wordrun.config import ProfilerConfig
from wordrun.train.profile import Profiler


@dataclass
class DurationsConfig(ProfilerConfig):
    """The duration of each step, in profile/durations.txt."""

    name: str = "durations"
    digits: int = 6
    """Digits after the decimal point."""


class Durations(Profiler):
    def start(self):
        self.times = [time.perf_counter()]

    def step(self):
        self.times.append(time.perf_counter())

    def stop(self):
        lines = [f"{end - begin:.{self.options.digits}f} s" for begin, end in pairwise(self.times)]
        self.file("durations.txt").write_text("\n".join(lines) + "\n")
