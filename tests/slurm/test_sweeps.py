"""Sweeps whose points are steps of a job, and the code that a submitted job runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Cluster

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"

# Instead of wordrun: each rank notes its node, and waits until as many points as ``together`` have begun.
POINT = """
import json, os, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
run, end = Path(words["hydra.run.dir"]), time.monotonic() + 100
run.mkdir(parents=True, exist_ok=True)
(run / f"rank-{os.environ['RANK']}").write_text(os.environ["SLURMD_NODENAME"])
while len(list(run.parent.glob("*/rank-0"))) < int(words["together"]):
    assert time.monotonic() < end, "the other points have not begun"
    time.sleep(0.05)
if os.environ["RANK"] == "0":
    (run / "run.json").write_text(json.dumps({"exit_reason": "finished"}))
"""


def nodes_of(cluster: Cluster, folder: Path, allocation: list[str], **options: int) -> list[list[str]]:
    """Run two points at the same time in an allocation; return the nodes of each point's ranks."""
    (folder / "point.py").write_text(POINT)
    (folder / "run.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from wordrun.study import options, sweep\n"
        f"command, launcher = [sys.executable, 'point.py'], options.LauncherOptions(**{options})\n"
        "batch = [['together=2', f'number={n}'] for n in range(2)]\n"
        "sys.exit(sweep.launch(Path('s'), command, launcher, batch, lambda words, number: str(number)))\n"
    )
    done = cluster.run("salloc", *allocation, sys.executable, "run.py", timeout=150)
    logs = "\n".join(path.read_text() for path in folder.glob("s/*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "sweep s: 2 finished" in done.stdout
    return [[path.read_text() for path in sorted(folder.glob(f"s/{n}/rank-*"))] for n in range(2)]


def test_points_are_steps_on_disjoint_nodes(cluster: Cluster, tmp_path: Path) -> None:
    first, second = nodes_of(cluster, tmp_path, ["-N4", "-n4"], nodes=2)
    assert (len(first), len(second)) == (2, 2)
    assert len({*first, *second}) == 4


def test_small_points_share_a_node(cluster: Cluster, tmp_path: Path) -> None:
    first, second = nodes_of(cluster, tmp_path, ["-N1", "-n4"], np=2)
    assert (len(first), len(second)) == (2, 2)
    assert len({*first, *second}) == 1


def test_a_job_runs_the_code_of_the_submission(cluster: Cluster, tmp_path: Path) -> None:
    """The project's, and that of a checkout of wordrun, though another is installed in editable mode."""
    checkout = tmp_path / "checkout"
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    version, value, config = (
        checkout / "src/wordrun/common/version.py",
        tmp_path / "mine.py",
        checkout / "conf/config.yaml",
    )
    lines = version.read_text()

    def edit(state: str) -> None:
        version.write_text(f"{lines}\nSTATE = {state!r}\n")
        value.write_text(f"STATE = {state!r}\n")
        config.write_text(f"# {state}\n")

    edit("submitted")
    (tmp_path / "main.py").write_text(
        "import mine, os, pathlib, wordrun.conf, wordrun.common.version\n"
        "config = pathlib.Path(wordrun.conf.__file__).with_name('config.yaml').read_text().split()[1]\n"
        "open(f'{mine.STATE}-{wordrun.common.version.STATE}-{config}-{os.environ[\"RANK\"]}.told', 'w')\n"
    )
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "outputs" / "launches").mkdir(parents=True)  # or the records would be in the user's home
    blocker = cluster.start("salloc", "-N4", "--exclusive", "sleep", "600")
    end = time.monotonic() + 60
    while not cluster.run("squeue", "--noheader", "--states=R").stdout:
        assert blocker.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    for name, words in (("frozen", ()), ("edited", ("--no-freeze",))):
        job = ("--job-name", name, "-N", "2", "-n", "2", "--walltime", "0:05:00")
        done = cluster.run(
            "launch", "--submit", *job, *words, "--", "python", "main.py", PATH=PATH, PYTHONPATH=f"{checkout}/src"
        )
        assert done.returncode == 0, done.stderr
        assert ("code: a copy in outputs/jobs/frozen-" in done.stdout) == (name == "frozen")
    edit("edited")
    cluster.run("scancel", "--state=RUNNING", "--user=root").check_returncode()
    cluster.wait_idle(90)
    told = sorted(path.name for path in tmp_path.rglob("*.told"))
    outs = "\n".join(path.read_text() for path in tmp_path.glob("*.out"))
    # Without a copy, conf/ comes from the checkout that is installed in editable mode.
    assert [name for name in told if name.startswith("edited-edited-")] == told[:2], outs
    assert told[2:] == [f"submitted-submitted-submitted-{rank}.told" for rank in range(2)], outs
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs" / "launches").glob("*.json")]
    codes = [record["code"] for record in records if "code" in record]
    assert [code["folder"] for code in codes] == [str(tmp_path)]
    assert codes[0]["untracked"]


def test_members_of_an_array_have_sweeps_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sweep.sh").write_text(
        "#!/bin/sh\n#SBATCH --array=0-1 --ntasks=1 --output=%a.out\n"
        "exec wordrun -m data=sample model=nano tracker=jsonl train.max_iters=1 train.eval_iters=1 "
        "model.n_layer=1 model.n_head=1 model.n_embd=8 model.block_size=8 train.dtype=fp32 train.sample_tokens=0 "
        "hydra/launcher=wordrun "
        "train.seed=1$SLURM_ARRAY_TASK_ID,2$SLURM_ARRAY_TASK_ID\n"
    )
    done = cluster.run("sbatch", "--parsable", "sweep.sh", PATH=PATH)
    assert done.returncode == 0, done.stderr
    cluster.wait_idle(150)
    folders = sorted((tmp_path / "outputs" / "sweeps").iterdir(), key=lambda path: path.name[-1])
    assert [folder.name.rpartition("-")[2] for folder in folders] == [f"{done.stdout.strip()}_{n}" for n in range(2)]
    for n, folder in enumerate(folders):
        rows = (folder / "points.csv").read_text().splitlines()[1:]
        assert [(row.split(",")[2], row[-2:]) for row in rows] == [("done", f"1{n}"), ("done", f"2{n}")]
