"""torch.compile: works where there is a compiler, and says what is missing where there is none.

One process, but a minute of it, so that it is no unit test.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

SMALL = tuple(
    shlex.split("""
    model=nano
    data=sample tracker=jsonl train.dtype=fp32 train.device=cpu train.max_iters=4 train.log_interval=1
    train.eval_interval=0 train.sample_tokens=0 model.n_layer=1 model.n_head=2 model.n_embd=16
    model.block_size=16 model.batch_size=4
""")
)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which torch.compile uses")
def test_a_compiled_model_has_the_same_losses(command: Command, ranks: Command, tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Plain loops take g++ half the time of vector instructions; for those it also compiles ten programs that try them.
    env |= {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    words = ["train.compile=true", "hydra.run.dir=compiled"]
    for done in (
        command("wordrun", *SMALL, *words, timeout=170, **env),
        ranks(1, "-m", "wordrun", *SMALL, "hydra.run.dir=eager", under="fork"),
    ):
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "cache").rglob("*.so"))  # it has compiled something
    sources = [path.read_text() for path in (tmp_path / "cache").rglob("*.cpp")]
    assert any("inductor_entry_cpp" in text for text in sources), "what calls the kernels is not compiled"
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)


SCRIPT = """
import json, os, sys
import torch
import wordrun
from wordrun import dist
from wordrun.train.hooks import compiling

compiling.LEAST_S, compiling.FASTER = 0, float("inf")  # auto compiles, however short the run is
os.environ["CXX"] = sys.executable  # only its existence matters

whole = torch.nn.Module.compile
torch.nn.Module.compile = lambda module, options: whole(module, backend="aot_eager")  # without g++: minutes
with dist.session() as world:
    torch.set_num_threads(1)
    for words in json.load(open(sys.argv[1])):
        cfg = dist.broadcast(wordrun.compose(words) if world.rank == 0 else None, world)
        with wordrun.Trainer(cfg, world) as trainer:
            trainer.train()
            compiled = [block._compiled_call_impl is not None for block in trainer.backend.parts[0].blocks.values()]
            assert all(compiled) == bool(trainer.cfg.train.compile)
"""


def test_compiled_blocks_of_divided_models_have_the_same_losses(
    ranks: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activation checkpointing and attention within documents; LLaMA's one block follows the embedding.

    DDP and FSDP: below, and in test_experts.py.
    """
    monkeypatch.chdir(tmp_path)
    words = [
        *SMALL,
        *shlex.split("""
        tokenizer=byte data.mask_documents=true model.vocab_size=258 model.n_layer=2
        train.checkpoint_interval=0 train.activation_checkpointing=full train.max_iters=2
    """),
    ]
    settings = {
        **{backend: [f"train.backend={backend}"] for backend in ("TP", "PP")},
        "LLaMA": shlex.split("""
            train.backend=TP model=llama_debug model.n_layer=1 model.n_kv_head=2
            train.activation_checkpointing=none
        """),
    }
    runs = [
        [*words, *setting, f"train.compile={compile_}", f"hydra.run.dir={name}-{compile_}"]
        for name, setting in settings.items()
        for compile_ in ("true", "false")
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", "runs.json", under="fork", timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for name in settings:
        compiled, plain = (losses(tmp_path / f"{name}-{each}") for each in ("true", "false"))
        assert len(plain) == 2
        assert compiled == pytest.approx(plain, rel=1e-5), name


def test_ranks_compile_in_the_midst_of_a_run(ranks: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "train.max_iters=18", "train.checkpoint_interval=0"]
    masked = [
        "tokenizer=byte",
        "data.mask_documents=true",
        "model.vocab_size=258",
        "train.activation_checkpointing=full",
    ]
    more = {"DDP": [], "FSDP": masked}
    runs = [
        [
            *words,
            *more[backend],
            f"train.backend={backend}",
            f"train.compile={compile_}",
            f"hydra.run.dir={backend}-{compile_}",
        ]
        for backend in more
        for compile_ in ("auto", "false")
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = ranks(2, "script.py", "runs.json", under="fork", timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for backend in more:
        auto, plain = (losses(tmp_path / f"{backend}-{each}") for each in ("auto", "false"))
        assert len(plain) == 18
        assert auto == pytest.approx(plain, rel=1e-5), backend
        assert json.loads((tmp_path / f"{backend}-auto/run.json").read_text())["compile"]["compiled"] is True


def test_without_a_compiler_it_says_what_to_do(command: Command, tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": "/nonexistent"}
    done = command("wordrun", *SMALL, "train.compile=true", "hydra.run.dir=run", **cache)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.compile=true: torch.compile failed to compile")
    assert "train.compile=false" in line
    assert "g++" in line
    assert "UserError" in json.loads((tmp_path / "run" / "run.json").read_text())["exit_reason"]
