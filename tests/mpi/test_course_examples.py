"""Each line in the table of examples/README.md: examples train, and their ranks agree.

Lines of MPI and Accelerate, which also reads variables of MPI, run as printed. For the others ``launch`` starts
ranks that only write down their variables, and the example runs with these on ranks that are forked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

import forked
from wordrun.launch.address import free_port

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TABLE = dict(re.findall(r"^\| \[([\w.]+)\].*\| `(.*)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
Run = Callable[..., str]
EXTRAS = {
    "accelerate": "examples",
    "deepspeed": "deepspeed",
    "lightning": "examples",
    "sklearn": "examples",
    "tensorboard": "examples",
    "transformers": "examples",
}
AS_PRINTED = ("collectives.py", "futures.py", "mnist_accelerate.py")
FORKED = [(name, 0, "float32") for name in TABLE if name not in AS_PRINTED] + [
    ("llama_fsdp_tp.py", 2, "float32"),
    ("mnist_ddp.py", 1, "float64"),
    ("mnist_ddp.py", 2, "float64"),
]
"""Examples, numbers of ranks, and what they compute in; 0: as in the line."""
NOTE = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ.get('RANK', '0'), 'w'))"
# Runs examples, one after the other, on ranks that it forks: they share its imports, but change nothing for each other.
SERVER = """
import contextlib, importlib, json, os, runpy, sys, traceback

import torch

models = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.resnet.modeling_resnet")
for module in ("sklearn.datasets", *models, "transformers.trainer", "lightning", "deepspeed", "tensorboard"):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)

def rank(script, env, out, dtype):
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))  # torch has read the variable of the first process
    torch.set_default_dtype(dtype)
    torch.float32 = dtype  # examples name it for their images
    os.environ.clear()
    os.environ.update(env)
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

for out, script, envs, dtype in json.load(open("runs.json")):
    pids = []
    for env in envs:
        pids.append(os.fork())
        if not pids[-1]:
            rank(script, env, out, getattr(torch, dtype))
    failed = any([os.waitpid(pid, 0)[1] for pid in pids])
    os.rename(out, f"{out}.failed" if failed else f"{out}.done")
"""


def size(line: str) -> int:
    """Return the number of ranks that a line starts."""
    return int(line.split()[2]) if line.startswith("launch -n ") else 1


def missing(name: str) -> str:
    """Return which package an example lacks, or an empty string."""
    needs = re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / name).read_text(), re.MULTILINE)
    modules = {*needs, *(["tensorboard"] if name == "resnet50_lightning.py" else [])}
    lacks = [module for module in EXTRAS if module in modules and importlib.util.find_spec(module) is None]
    return f"needs {lacks[0]}: pip install 'wordrun[{EXTRAS[lacks[0]]}]'" if lacks else ""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all examples of FORKED that can run here; return the folder with their outputs and what they write."""
    home = tmp_path_factory.mktemp("examples")
    (home / "examples").symlink_to(EXAMPLES)
    runs = []
    noted: set[str] = set()
    for name, n, dtype in ((name, n or size(TABLE[name]), dtype) for name, n, dtype in FORKED if not missing(name)):
        start = re.sub(r"^launch -n \d+", f"launch -n {n}", TABLE[name].removesuffix(f"python examples/{name}"))
        if start not in noted:  # the same for most examples
            words = f"{start}{shlex.join(['python', '-c', NOTE, f'env-{start}-'])}"
            done = subprocess.run(["sh", "-c", words], cwd=home, capture_output=True, text=True, timeout=90)
            assert done.returncode == 0, done.stderr
            noted.add(start)
        envs = [json.loads((home / f"env-{start}-{rank}").read_text()) for rank in range(n)]
        port = {"MASTER_PORT": f"{free_port()}"} if n > 1 else {}  # launch's may be taken by now
        runs.append((f"{name}-{n}-{dtype}", f"examples/{name}", [{**env, **port} for env in envs], dtype))
    (home / "runs.json").write_text(json.dumps(runs))
    (home / "server.py").write_text(SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        done = forked.run(1, ["server.py"], os.environ, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return home


@pytest.fixture
def run(command: Command, request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return what an example prints, on ``n`` ranks if that is not the number in its line, in ``dtype``."""
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def begin(name: str, n: int = 0, dtype: str = "float32") -> str:
        if why := missing(name):
            pytest.skip(why)
        if name in AS_PRINTED:
            done = command(*shlex.split(TABLE[name]), timeout=150)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout
        home = request.getfixturevalue("outputs")
        (found,) = home.glob(f"{name}-{n or size(TABLE[name])}-{dtype}.*")
        assert found.suffix == ".done", found.read_text()
        return forked.without_gloo(found.read_text())

    return begin


def ends(out: str, ranks: int) -> tuple[float, ...]:
    """Return the numbers in the ranks' last lines, after asserting that there are ``ranks`` and that they are equal."""
    found = re.findall(rf"^rank (\d) of {ranks} on cpu: (.*)$", out, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(ranks)], out
    assert len({text for _, text in found}) == 1, out
    return tuple(float(number) for number in re.findall(r"\d+\.\d+", found[0][1]))


def losses(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: loss (.*)$", out, re.MULTILINE)]


def test_the_table_lists_every_example() -> None:
    assert set(TABLE) == {path.name for path in EXAMPLES.glob("*.py")}
    assert all(f"python examples/{name}" in line for name, line in TABLE.items())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_examples_say_how_to_run_them_and_where_they_come_from(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 80
    docstring = text.split('"""')[1]
    assert f"python examples/{name}\n" in docstring
    assert re.search("CMU|MIT|Turing|JSC|ALCF", docstring)
    assert re.search("Compared with|What changes|begins? with this program", docstring.replace("\n", " "))


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    # One rank and two round differently, which 110 steps in fp32 amplify, on some processors to 6e-4.
    [("mnist_ddp.py", 1, "float64"), ("mnist_fsdp.py", 2, "float32"), ("mnist_deepspeed.py", 2, "float32")],
)
def test_digits_are_learned_as_under_ddp(name: str, n: int, dtype: str, run: Run) -> None:
    out = run(name, n, dtype)
    before, after, accuracy = ends(run("mnist_ddp.py", 2, dtype), 2)
    assert after < before / 3
    assert accuracy > 0.9
    assert ends(out, n)[:2] == pytest.approx((before, after), abs=2e-5 if dtype == "float64" else 2e-4)
    assert out.count(" holds 19141 of 38282 weights") == (2 if name == "mnist_fsdp.py" else 0)


def test_accelerate_and_one_process_learn_the_digits(run: Run) -> None:
    before, after, accuracy = ends(run("mnist_accelerate.py"), 2)
    assert after < before / 3
    assert accuracy > 0.9
    plain = re.fullmatch(r"cpu: loss (\S+) -> \S+, accuracy (\S+)\n", run("mnist.py"))
    assert plain
    assert float(plain[1]) == pytest.approx(before, abs=1e-4)
    assert float(plain[2]) > 0.9


def test_gpt2_under_ddp_goes_as_one_process(run: Run) -> None:
    plain, ddp = run("gpt2.py"), run("gpt2_ddp.py")
    assert losses(plain)[-1] < 0.7 * losses(plain)[0]
    assert losses(ddp) == pytest.approx(losses(plain), abs=1e-3)
    (end,) = ends(ddp, 2)
    assert f"{end:.3f}"[:4] in plain.splitlines()[-1]
    assert end < 3.5


def test_gpt2_with_lightning(run: Run) -> None:
    (loss,) = ends(run("gpt2_lightning.py"), 2)
    assert loss < 3.5


def test_gpt2_with_the_trainer_of_hugging_face(run: Run) -> None:
    before, after = ends(run("gpt2_hf_trainer.py"), 2)
    assert after < 0.7 * before


def test_llama_goes_alike_on_both_axes(run: Run) -> None:
    both, one = run("llama_fsdp_tp.py"), run("llama_fsdp_tp.py", n=2)
    assert losses(both)[-1] < 0.5 * losses(both)[0]
    assert losses(one) == pytest.approx(losses(both), abs=1e-3)
    assert both.count("holds (16, 64) of") == 4
    assert one.count("holds (32, 64) of") == 2


def test_resnet50_logs_to_tensorboard_once(run: Run, outputs: Path) -> None:
    (last,) = ends(run("resnet50_lightning.py"), 2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (log,) = (outputs / "tb_logs" / "resnet50").glob("version_0/events*")
    events = EventAccumulator(str(log))
    events.Reload()
    values = [event.value for event in events.Scalars("training_loss")]
    assert len(values) == 12
    assert values[-1] == pytest.approx(last, abs=1e-4)
    assert sum(values[-4:]) < 0.95 * sum(values[:4])
    (outputs / "resnet50.ckpt").unlink()  # 94 MB


def test_collectives_of_mpi_and_torch_agree(run: Run) -> None:
    assert run("collectives.py").splitlines() == [
        "all-reduce, the sum on every rank: [[10.0], [10.0], [10.0], [10.0]]",
        "reduce, the sum on the last rank: [[1.0], [2.0], [3.0], [10.0]]",
        "broadcast, from the last rank: [[4.0], [4.0], [4.0], [4.0]]",
        f"all-gather, everything on every rank: {[[1.0, 2.0, 3.0, 4.0]] * 4}",
        "scatter, a part for each rank: [[0.0], [10.0], [20.0], [30.0]]",
    ]


def test_futures_share_the_tasks_out(run: Run) -> None:
    *tasks, best = run("futures.py").splitlines()
    assert len(tasks) == 8
    assert {line.rpartition(" ")[2] for line in tasks} == {"1", "2"}
    assert re.fullmatch(r"best of 3 ranks: learning rate \S+", best)


JOIN = "import torch.distributed as dist; dist.init_process_group('gloo')"
# With the barrier, since gloo's start fails on a rank that is still connecting when another has left again.
WHO = """
dist.barrier()
print('rank', dist.get_rank(), 'of', dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""
SPAWN = """
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number, store):
    dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2)
    dist.barrier()
    print("rank", number, "of", dist.get_world_size(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, args=(f"{__file__}.store",), nprocs=2)
"""


@pytest.mark.parametrize("start", ["mp.spawn", "a script with `--local_rank`", "a notebook"])
def test_lines_of_the_page_on_frameworks(start: str, command: Command, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    line = re.findall(rf"^\| `?{re.escape(start)}`? \| `(.*?)` \|", page, re.MULTILINE)[0]
    local_rank = "import sys; assert sys.argv[1] in ('--local_rank=0', '--local_rank=1')"
    (tmp_path / "train.py").write_text(SPAWN if start == "mp.spawn" else "\n".join([JOIN, local_rank, WHO]))
    cells = [nbformat.v4.new_code_cell(code) for code in (JOIN, WHO)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebook.ipynb")
    done = command("sh", "-c", line)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("rank [01] of 2", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]
