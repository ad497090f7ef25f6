import csv
from dataclasses import dataclass

from wordrun.config import TrackerConfig
from wordrun.track.base import AppendOnlyTracker


@dataclass
class CsvConfig(TrackerConfig):
    """losses.csv in the run directory."""

    delimiter: str = ","
    """Character between columns."""


class CsvTracker(AppendOnlyTracker):
    def append(self, step, metrics):
        row = [step, metrics.get("loss"), metrics.get("val_loss")]
        with open(self.run.path / "losses.csv", "a", newline="") as file:
            csv.writer(file, delimiter=self.options.delimiter).writerow(row)
