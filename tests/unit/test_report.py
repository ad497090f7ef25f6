"""report.html, ``wordrun ls`` and ``wordrun tail``, over run directories as runs leave them."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from wordrun.commands import ls, report, tail
from wordrun.commands.report import ReportConfig, runs_in
from wordrun.common.errors import UserError
from wordrun.common.run_dir import find, in_use
from wordrun.config.arguments import parse
from wordrun.track import metrics_jsonl
from wordrun.track.plots import POINTS, draw, thin
from wordrun.track.report import facts, page
from wordrun.track.run_json import load, state_of

CONFIG = "model: {name: nano, n_layer: 2}\ndata: {name: shakespeare}\ntrain: {backend: DDP, max_iters: 40, seed: 1}\n"


def make_run(folder: Path, lines: int = 20, *, lr: float = 1e-3, reason: str = "finished", **facts: Any) -> Path:
    """Write a run directory with ``lines`` lines of training."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"{CONFIG}optimizer: {{learning_rate: {lr}}}\n")
    world = {"size": 2, "nodes": 1, "hosts": ["node-1"]}
    record = {"exit_reason": reason, "start": "2026-01-01T10:00:00+0000", "world": world, "steps": lines, **facts}
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            line = {
                "step": step,
                "loss": 4 - step / lines,
                "lr": lr,
                "grad_norm": 1.0,
                "dt": 0.1,
                "dtf": 0.04,
                "dtb": 0.05,
                "tps": 1e5,
                "mfu": None,
                "tokens": 1000 * step,
                "time": 0.1 * step,
                "slowest_rank": 1,
                "slowest_by": 0.02,
            }
            file.write(json.dumps(line) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "val_loss": 4.1 - step / lines}) + "\n")
    (folder / "samples.txt").write_text("--- step 10 ---\nfirst\n\n--- step 20 ---\n<b>second</b>\n\n")
    return folder


def append(file: Path, text: str) -> None:
    """Add ``text`` to ``file``."""
    with file.open("a") as stream:
        stream.write(text)


class Page(HTMLParser):
    """The text of a page, the names of its plots, and the addresses that it would load."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__()
        self.text, self.plots, self.loads, self.tags = "", {}, [], []
        self.feed(files[-1].read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if tag == "img":
            kind, _, content = (found.pop("src") or "").partition(",")
            assert kind == "data:image/png;base64"
            self.plots[found["alt"]] = base64.b64decode(content)
        names = ("src", "href", "xlink:href") if tag != "a" else ()
        self.loads += [value for name, value in found.items() if name in names]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_the_run_and_loads_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", best_val_loss=3.1, seconds=125.0)
    page_ = Page(page.write(run))
    assert page_.loads == []
    assert "script" not in page_.tags
    assert not re.search(r"url\(|@import", (run / "report.html").read_text())
    shown = ("finished", "2 min 5 s", "Slowest ranks", "20.0 ms a step", "node-1", "train.max_iters", "<b>second</b>")
    for text in shown:
        assert text in page_.text
    assert [*page_.plots] == ["loss.png", "throughput.png"]
    assert not (run / "plots").exists()


def test_the_end_of_a_run_also_writes_the_plots_of_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = page.write(run, plots=True)
    assert written == [run / "plots/loss.png", run / "plots/throughput.png", run / "report.html"]
    assert Page(written).plots == {file.name: file.read_bytes() for file in written[:2]}


def test_large_numbers_fit_into_a_tile() -> None:
    assert [page._count(n) for n in (1234567, 12_345_678, 2.5e9)] == ["1,234,567", "12.3 million", "2.5 billion"]
    assert [facts.duration(s) for s in (7, 125, 900.5, 7260)] == ["7.0 s", "2 min 5 s", "15 min", "2 h 1 min"]


def test_a_later_launch_is_a_row_and_a_mark(tmp_path: Path) -> None:
    earlier = [{"start": "2026-01-01T09:00:00+0000", "steps": 8, "exit_reason": "stopped by SIGTERM, saved"}]
    run = make_run(tmp_path / "run", resumed_from={"run": "x", "step": 8}, earlier=earlier)
    found = Page(page.write(run))
    assert "Launches" in found.text
    assert "stopped by SIGTERM, saved" in found.text
    assert "8 to 20" in found.text
    measured = metrics_jsonl.read(run)
    title = "shakespeare: nano, DDP  (run)"
    assert found.plots["loss.png"] == draw(measured, title, [8])["loss.png"] != draw(measured, title)["loss.png"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has not logged a step yet"),
        (lambda run: (run / "run.json").unlink(), "run.json is missing or cannot be read"),
        (lambda run: (run / "run.json").write_text("{"), "run.json is missing or cannot be read"),
        (lambda run: (run / "config.yaml").write_text("a: [b"), "finished"),
        (lambda run: append(run / "metrics.jsonl", '{"step": 21, "lo'), "1 lines of metrics.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n[]\n7\n'), "2 lines of"),
    ],
    ids=["no metrics", "no record", "broken record", "broken config", "broken line", "other lines"],
)
def test_a_damaged_run_has_a_page_that_says_so(tmp_path: Path, damage: Any, says: str) -> None:
    run = make_run(tmp_path / "run")
    damage(run)
    assert says in Page(page.write(run)).text


def test_a_living_run_is_called_so_and_an_incomplete_line_is_no_damage(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reason="running")
    append(run / "metrics.jsonl", '{"step": 21, "lo')
    text = Page(page.write(run)).text
    assert "still running when this page was written" in text
    assert "cannot be read" not in text


def test_a_page_shows_the_profiles(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Profile" not in Page(page.write(run)).text
    (run / "profile").mkdir()
    (run / "profile/pyinstrument.txt").write_text("12.3 train_step\n")
    (run / "profile/summary-rank-3.txt").write_text("aten::mm 40%\n")
    text = Page(page.write(run)).text
    for shown in ("profile/pyinstrument.txt", "12.3 train_step", "profile/summary-rank-3.txt", "aten::mm 40%"):
        assert shown in text


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([f"run={tmp_path}"]) == 2
    assert "contains no run" in capsys.readouterr().err
    assert report.main([f"run={tmp_path / 'none'}"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert report.main([f"runs={tmp_path}"]) == 2
    assert "contains no run" in capsys.readouterr().err
    assert report.main([f"run={make_run(tmp_path / 'run')}", f"out={tmp_path / 'none' / 'x.html'}"]) == 1
    assert "choose another file with out=FILE" in capsys.readouterr().err


def test_a_comparison_lists_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3), ("c", 4e-3)):
        make_run(tmp_path / "outputs" / name, lr=lr, loss=3.0)
    (tmp_path / "outputs" / "latest").symlink_to("c")
    out = tmp_path / "all.html"
    assert report.main([f"runs={tmp_path}/outputs/a, {tmp_path}/outputs", f"out={out}"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = Page([out]).text
    assert "3 runs" in text
    assert "optimizer.learning_rate" in text
    assert "train.max_iters" not in text  # the same in all of them
    assert "0.004" in text
    assert report.main([f"run={tmp_path}/outputs", f"out={out}"]) == 0  # the same option for one run and for several
    assert "3 runs" in Page([out]).text
    assert [path.name for path in runs_in(f"{tmp_path}/outputs/*")] == ["a", "b", "c"]


def with_metric(run: Path, *values: float, metric: str = "val_accuracy") -> Path:
    """Append evaluations that report ``metric``, of which higher values are better, to a run that is compared by it."""
    for number, value in enumerate(values):
        line = {"step": 10 * number + 10, "val_loss": 3.0, "val_perplexity": 20.0, metric: value}
        append(run / "metrics.jsonl", json.dumps(line) + "\n")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "best_metric": metric, "best_mode": "max"}))
    return run


def test_a_comparison_shows_own_metrics(tmp_path: Path) -> None:
    plain, first = make_run(tmp_path / "plain"), with_metric(make_run(tmp_path / "a", lr=2e-3), 0.125, 0.75, 0.5)
    ended = with_metric(make_run(tmp_path / "b", best_value=0.875, end="now"), 0.25)
    names = [f"val_m{number}" for number in range(9)]
    append(ended / "metrics.jsonl", json.dumps({"step": 20, "val_loss": 3.0, **dict.fromkeys(names, 1.0)}) + "\n")
    found = Page([page.compare([plain, first, ended], tmp_path / "all.html")])
    table = found.text[found.text.index("Runs") : found.text.index("Curves")]
    assert "val_accuracybest val_accuracyval_m0val_m1" in table
    assert "a" + "finished20" + "0.50.75" in table  # the last value, and the best
    assert "b" + "finished20" + "0.250.875" in table
    assert "val_m6" in table
    assert "val_m7" not in table  # enough
    evaluated = ["val_accuracy", *(f"val_m{number}" for number in range(7))]
    assert [*found.plots] == ["val_loss", "loss", *evaluated, "tps", "grad_norm"]


def test_a_page_of_many_lines_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lines=30_000)
    (file,) = page.write(run)
    assert file.stat().st_size < 1_000_000
    x, low, high, mean = thin(range(30_000), [float(i % 7) for i in range(30_000)])
    assert len(x) <= POINTS + 1
    assert (min(low), max(high)) == (0, 6)
    assert min(mean) > 2


def test_metrics_of_hooks_share_a_figure_for_each_kind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (5, 10):
        values = {f"{kind}/blocks.{i}": 1.0 for kind in ("grad_max", "activation_max") for i in range(12)}
        append(run / "metrics.jsonl", json.dumps({"step": step, **values}) + "\n")
    plots = Page(page.write(run)).plots
    assert [*plots] == ["loss.png", "throughput.png", "metrics.png"]
    height = int.from_bytes(plots["metrics.png"][20:24], "big")
    assert height == int(130 * (2 * 2.2 + 0.5))  # two panels


def test_spikes_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "spike" not in Page(page.write(run)).text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    text = "".join(
        json.dumps({**line, "spikes": line["step"] // 8} if "loss" in line else line) + "\n" for line in lines
    )
    (run / "metrics.jsonl").write_text(text)
    assert metrics_jsonl.read(run).spikes() == [7, 15]
    assert "loss spikes2" in Page(page.write(run)).text.replace("\n", "")


def test_metrics_are_columns_with_gaps(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": null, "mfu": 40}', '{"step": 2, "val_loss": 1.5}', "?"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = metrics_jsonl.read(tmp_path)
    assert [found.training.rows, found.evaluation.rows, found.broken] == [2, 1, 1]
    assert found.training.last("loss") == 2.0
    assert str(list(found.training["mfu"])) == "[nan, 40.0]"


def test_ls_shows_states_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    make_run(tmp_path / "outputs" / "data" / "good")
    make_run(tmp_path / "outputs" / "data" / "bad", reason="ValueError: no")
    killed = make_run(
        tmp_path / "outputs" / "data" / "killed", reason="running", world={"hosts": [socket.gethostname()]}
    )
    assert ls.main([str(tmp_path / "outputs")]) == 0
    text = capsys.readouterr().out
    rows = {words[0]: words for line in text.splitlines() if (words := line.split())}
    assert rows["data/good"][1:6] == ["finished", "20", "3.0000", "3.1000", "100"]
    assert rows["data/bad"][1] == "failed"
    assert rows["data/killed"][1] == "died"
    assert ls.main([str(tmp_path / "none")]) == 2
    assert "there are no runs below" in capsys.readouterr().err
    assert [path.name for path in find(tmp_path)] == ["bad", "good", "killed"]
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", holder, str(killed / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert state_of(load(killed)) == "running"
        process.communicate(b"\n")
    assert not in_use(killed)


def test_ls_shows_the_best_value_of_the_metric_that_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = tmp_path / "outputs"
    make_run(outputs / "plain")
    with_metric(make_run(outputs / "a", reason="running"), 0.125, 0.75, 0.5)
    with_metric(make_run(outputs / "b", end="now", best_value=0.875), 0.25)
    assert ls.main([str(outputs)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words for line in lines if (words := line.split())}
    assert "val_loss  val_bpb  best val_accuracy" in header
    assert rows["a"][4:6] == ["3.0000", "0.7500"]  # so far
    assert rows["b"][4:6] == ["3.0000", "0.8750"]
    assert rows["plain"][4:6] == ["3.1000", "100"]


def test_tail_follows_until_the_run_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", reason="running")
    (run / "log.txt").write_text("".join(f"line {number}\n" for number in range(100)))

    def go_on() -> None:
        time.sleep(0.8)
        append(run / "log.txt", "one more\n")
        (run / "run.json").write_text(json.dumps({"exit_reason": "ValueError: no"}))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        tail.follow(parse(tail.TailConfig, [f"run={run}", "lines=2"])[0])
    finally:
        thread.join()
    assert capfd.readouterr().out.splitlines() == ["line 98", "line 99", "one more", "--- failed: ValueError: no ---"]


def test_tail_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no run"):
        tail.follow(tail.TailConfig(run=str(tmp_path)))


def test_a_first_word_is_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert report.main([str(run)]) == 0
    assert ReportConfig().run == "outputs/latest"
    assert Path(capsys.readouterr().out.strip()) == run / "report.html"
