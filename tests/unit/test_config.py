"""The config: documented, composed from conf/, checked, and clear about what is wrong."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import wordrun
from wordrun import model
from wordrun.backend.options import DDPConfig, TPConfig
from wordrun.commands.train import sweep_points
from wordrun.common import suggestions
from wordrun.common.errors import ConfigError
from wordrun.common.suggestions import nearest
from wordrun.config import schema as config
from wordrun.config.compose import Tree, as_yaml, compose, typed
from wordrun.config.registry import KINDS, field_docs
from wordrun.config.rules import check
from wordrun.config.schema import SECTIONS, SEVERAL, Config, as_dict, from_plain, schemas, to_plain
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers.options import BPETokenizerConfig, HFTokenizerConfig
from wordrun.model.options import GPTConfig, LlamaConfig, TransformerConfig
from wordrun.track.options import TrackerConfig, WandbConfig
from wordrun.train.optim.options import AdamWConfig, MuonConfig
from wordrun.train.options import accumulation

if TYPE_CHECKING:
    from conftest import Command

CONF = Path(__file__).parents[2] / "conf"
FILES = {group: sorted(p.stem for p in (CONF / group).glob("*.yaml")) for group in (*SECTIONS, "experiment")}
CHOICES = {group: sorted({*FILES[group], *(() if group == "experiment" else schemas(group))}) for group in FILES}
"""What each group offers: its files, and the parts themselves."""
DATACLASSES = [node for node in vars(config).values() if is_dataclass(node)]


@pytest.fixture(scope="module")
def plain() -> Config:
    """The config of an empty command line."""
    return compose()


def good(**changes: Any) -> Config:
    """Return a config that passes, with options changed as in ``model__n_head=3`` or a whole section."""
    data = TextConfig(name="sample", kind="sample")
    cfg = Config(model=GPTConfig(), backend=DDPConfig(), data=data, optimizer=AdamWConfig())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        node = getattr(cfg, section) if name else cfg
        assert hasattr(node, name or section)
        setattr(node, name or section, value)
    return cfg


def complaints(action: Callable[[], object]) -> list[str]:
    """Return the messages of the ConfigError that ``action`` raises; lists in them are on indented lines."""
    with pytest.raises(ConfigError) as caught:
        action()
    return re.split(r"\n(?!  )", str(caught.value))


# The schema and the files

CHOSEN_BY_DATA = ("override /tokenizer@_global_.tokenizer", "override /model@_global_.model")
"""How a data set's file chooses its tokenizer, or its model."""
CHOSEN_BY_DEFAULT = ("override /optimizer@_global_.optimizer", "override /schedule@_global_.schedule")
"""How the default model's file chooses what belongs to the recipe."""
IMAGES = {
    "data": ["cifar10", "digits", "fake_images", "imagefolder", "mnist"],
    "model": ["convnet", "resnet", "resnet18", "resnet50"],
}
"""The choices for images; the others are for text."""
NEEDED = {
    ("model", "hf"): ["model.path=a"],
    ("data", "text"): ["data.path=a.txt"],
    ("data", "shards"): ["data.path=a"],
    ("data", "hf"): ["data.dataset=a"],
    ("data", "mix"): ["data.mix={fineweb: 3, a: 1}"],
    ("data", "pairs"): ["data.path=a.jsonl"],
    ("data", "chat"): ["data.path=a.jsonl"],
    ("data", "imagefolder"): ["data.path=a"],
    ("tokenizer", "hf"): ["tokenizer.path=a"],
    ("hooks", "lr_range"): ["train.max_iters=100"],
    ("hooks", "statistics"): ["hooks.statistics.gradients=false"],
}
"""What a file cannot be chosen without."""


@pytest.mark.parametrize("node", DATACLASSES, ids=lambda node: node.__name__)
def test_every_option_says_what_it_means(node: type[Any]) -> None:
    docs = field_docs(node)
    inherited = {f.name for base in node.__mro__[1:] if is_dataclass(base) for f in fields(base)}
    silent = [f.name for f in fields(node) if node is not Config and not docs.get(f.name) and f.name not in inherited]
    assert silent == []
    assert node.__doc__
    assert "(" not in node.__doc__.split()[0]  # the docstring that dataclass makes by itself: "Name(field: ...)"


@pytest.mark.parametrize("round_", range(max(map(len, CHOICES.values()))))
def test_every_choice_composes_and_converts(round_: int) -> None:
    chosen = {group: names[round_ % len(names)] for group, names in CHOICES.items()}
    backend, experiment = chosen.pop("backend"), chosen.pop("experiment")
    assert isinstance(compose([f"experiment={experiment}"]), Config)  # its shapes need not suit every model
    if chosen["data"] in IMAGES["data"]:
        chosen |= {"model": IMAGES["model"][round_ % len(IMAGES["model"])]}
        backend = "ddp" if backend in ("tp", "pp", "3d") else backend  # they cannot divide such models
    elif chosen["model"] in IMAGES["model"]:
        chosen |= {"model": "nano"}
    if backend in ("pp", "3d"):  # a model's outputs stay on the last stage
        del chosen["metrics"]
    if backend == "deepspeed" and chosen["hooks"] == "ema":
        chosen |= {"hooks": "spikes"}
    if backend == "deepspeed" and chosen["optimizer"] == "muon":  # it needs whole matrices
        chosen |= {"optimizer": "adamw"}
    needed = [word for choice in chosen.items() for word in NEEDED.get(choice, [])]
    cfg = compose([f"train.backend={backend}", *(f"{g}={name}" for g, name in chosen.items()), *needed])
    assert isinstance(cfg, Config)
    assert cfg.backend.name.lower() == cfg.train.backend.lower() == backend
    assert cfg.profiler.name == chosen["profiler"]
    for section in {*SEVERAL} & {*chosen}:
        assert type(getattr(cfg, section)[chosen[section]]) is schemas(section)[chosen[section]].options


@pytest.mark.parametrize("name", FILES["model"])
def test_a_preset_is_known_by_the_name_of_its_file(name: str) -> None:
    assert preset(name).name == name


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in SECTIONS for name in FILES[group]])
def test_files_hold_only_differences(group: str, name: str) -> None:
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    base, *others = content.pop("defaults")
    chosen = {"data": CHOSEN_BY_DATA, "model": CHOSEN_BY_DEFAULT if name == "modern" else ()}.get(group, ())
    assert [key for other in others for key in other if key not in chosen] == []
    # In a group of several each part has a key of its own.
    schema = re.fullmatch(rf"/schema/{group}/(\w+)@({group}\.)?{name if group in SEVERAL else '_here_'}", base)
    assert schema, base
    defaults = asdict(schemas(group)[schema[1]].options())
    if schema[2]:  # a file for the whole config, such as hooks/lr_range.yaml
        (content,), defaults = content.values(), asdict(Config().train)
    assert {key: value for key, value in content.items() if defaults[key] == value} == {}


@pytest.mark.parametrize("name", FILES["experiment"])
def test_experiments_hold_only_differences(name: str) -> None:
    content = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    chosen = [choice for each in content.pop("defaults") for choice in each.items()]
    plain = compose([f"{group.removeprefix('override /')}={choice}" for group, choice in chosen])
    repeated = [
        f"{section}.{key}"
        for section, options in content.items()
        for key, value in options.items()
        if getattr(getattr(plain, section), key) == value
    ]
    assert repeated == []


@pytest.mark.parametrize("name", ["DDP", "ddp"])
def test_a_backend_may_be_typed_in_either_case(name: str) -> None:
    cfg = compose([f"train.backend={name}", "backend.bucket_cap_mb=7"])
    assert cfg.train.backend == cfg.backend.name == "DDP"
    assert isinstance(cfg.backend, DDPConfig)
    assert cfg.backend.bucket_cap_mb == 7


def test_the_line_of_the_talk_composes() -> None:
    cfg = compose(
        shlex.split(
            "train.backend=DDP train.eval_interval=100 data=shakespeare train.dtype=bf16 model.batch_size=64 "
            "model.block_size=1024 train.max_iters=1000 train.log_interval=10 train.compile=false"
        )
    )
    train = cfg.train
    assert (train.backend, train.eval_interval, train.max_iters, train.log_interval) == ("DDP", 100, 1000, 10)
    assert (train.dtype, train.compile, cfg.model.batch_size, cfg.model.block_size) == ("bf16", False, 64, 1024)
    assert cfg.data.name == "shakespeare"


def test_nano_is_as_nanogpt_trains_it_on_a_cpu() -> None:
    cfg = compose(["model=nano"])
    nano, adamw = cfg.model, cfg.optimizer
    assert (nano.n_layer, nano.n_head, nano.n_embd, nano.block_size, nano.batch_size) == (4, 4, 128, 64, 12)
    assert (adamw.learning_rate, adamw.warmup_iters, cfg.schedule.name) == (1e-3, 100, "cosine")
    assert adamw == compose(["model=nano", "optimizer=adamw"]).optimizer


def test_the_defaults(plain: Config) -> None:
    modern = plain.model
    assert (modern.n_layer, modern.n_head, modern.n_embd, modern.block_size, modern.batch_size) == (4, 4, 128, 128, 16)
    assert (plain.train.max_iters, [*plain.tracker], plain.data.offline) == (2000, ["jsonl", "wandb"], "sample")
    assert compose(["data=sample"]).data.offline == "error"


def test_the_experiment_shakespeare_is_nanogpts() -> None:
    gpt = compose(["experiment=shakespeare"]).model
    assert (gpt.n_layer, gpt.n_head, gpt.n_embd, gpt.block_size, gpt.batch_size) == (6, 6, 384, 256, 64)
    assert gpt.dropout == 0.2


def test_the_command_line_wins_over_an_experiment() -> None:
    cfg = compose(["experiment=shakespeare", "model.n_layer=2", "data=sample"])
    assert (cfg.model.n_layer, cfg.model.n_embd, cfg.data.kind) == (2, 384, "sample")


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("bfloat16", "bf16"), ("bf16", "bf16"), ("float16", "fp16"), ("float32", "fp32")]
)
def test_a_dtype_is_what_it_says(spelling: str, dtype: str) -> None:
    assert compose([f"train.dtype={spelling}"]).train.dtype == dtype


def test_a_config_survives_its_own_yaml(plain: Config) -> None:
    content = yaml.safe_load(as_yaml(plain))
    assert content == as_dict(plain)


# Sizes as published, to the last parameter: of the released models of GPT-2, LLaMA-160M, and Llama 2 and 3.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama_160m": 162_417_408,
    "llama2_7b": 6_738_415_616,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
}
# The GPT-3 table's names, which round their counts with the vocabulary and positions left in.
GPT3 = {
    "125m": 125e6,
    "350m": 356e6,
    "760m": 760e6,
    "1_3b": 1.3e9,
    "2_7b": 2.7e9,
    "6_7b": 6.7e9,
    "13b": 13e9,
    "175b": 175e9,
}


def preset(name: str) -> TransformerConfig:
    """Return the config that a file under conf/model makes, by its schema alone."""
    options = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    schema, *_ = options.pop("defaults")
    part = schemas("model")[schema.removeprefix("/schema/model/").removesuffix("@_here_")]
    made: TransformerConfig = part.options(**{key: value for key, value in options.items() if "${" not in str(value)})
    return made


def parameters(name: str) -> int:
    return model.meta_model(preset(name), 50257).num_parameters()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_presets_have_the_published_size(name: str, count: int) -> None:
    assert parameters(name) == count


@pytest.mark.parametrize("name", sorted({*FILES["model"]} - {*IMAGES["model"], "hf"}))
def test_every_preset_can_be_made_with_the_tokenizer_of_characters(name: str) -> None:
    cfg = compose([f"model={name}", "data=sample"]).model
    assert cfg == preset(name)
    assert model.meta_model(cfg, 65).vocab_size == (cfg.vocab_size or 65)


@pytest.mark.parametrize(("name", "count"), GPT3.items())
def test_gpt3_presets_have_the_published_size(name: str, count: float) -> None:
    assert math.isclose(parameters(f"gpt3_{name}"), count, rel_tol=0.02)


# The run directory


def test_a_run_has_a_directory_of_its_own(plain: Config) -> None:
    assert re.fullmatch(r"outputs/shakespeare/modern-DDP/\d{8}-\d{6}-[0-9a-f]{4}", plain.run_dir)
    assert compose(["data=sample", "model=gpt2"]).run_dir.startswith("outputs/sample/gpt2-DDP/")


def test_launch_chooses_the_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDRUN_RUN_ID", "20260101-000000-cafe")
    assert compose().run_dir == "outputs/shakespeare/modern-DDP/20260101-000000-cafe"


def test_the_user_chooses_the_run_directory() -> None:
    assert compose(["hydra.run.dir=/scratch/mine"]).run_dir == "/scratch/mine"


def test_data_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDRUN_DATA_HOME", "/data")
    assert compose().data.path == "/data/shakespeare/input.txt"
    monkeypatch.delenv("WORDRUN_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert compose().data.path == "/home/ada/.cache/wordrun/shakespeare/input.txt"


# Where a config comes from


def test_composing_leaves_a_callers_hydra_alone() -> None:
    with initialize_config_module("wordrun.conf", version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose()
        complaints(lambda: compose(["no.such=1"]))
        assert GlobalHydra.instance().hydra is before
    GlobalHydra.instance().clear()
    compose()
    assert not GlobalHydra.instance().is_initialized()


def test_composing_writes_nothing_and_changes_no_variable(tmp_path: Path) -> None:
    before = dict(os.environ), Path.cwd()
    compose(["data=sample"])
    assert (dict(os.environ), Path.cwd()) == before
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text("# @package _global_\nmodel: {n_layer: 1}\ntrain: {max_iters: 3}\n")
    cfg = compose(["experiment=tiny"], tree=Tree(extra_dir=str(tmp_path / "mine")))
    assert (cfg.model.n_layer, cfg.train.max_iters, cfg.model.n_head) == (1, 3, 4)


def test_an_experiment_that_names_a_backend_without_its_options_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "odd.yaml").write_text("# @package _global_\nbackend: {name: FSDP}\n")
    (line,) = complaints(lambda: compose(["experiment=odd"], tree=Tree(extra_dir=str(tmp_path))))
    assert "train.backend=DDP" in line
    assert "backend=FSDP" in line
    assert "override /train.backend" in line


def test_the_same_config_comes_from_python_and_from_the_command(command: Command) -> None:
    words = ["data=sample", "model=nano", "model.n_layer=2", "optimizer.gas=3", "hydra.run.dir=here"]
    done = command("wordrun", *words, "--cfg", "job")
    from_python = as_dict(wordrun.compose(words))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {**from_python, "run_dir": ""}


# What Hydra refuses, or should have: override, and what the message has to contain

UNKNOWN = {
    "train.max_iter=3": ["'train.max_iter'", "did you mean 'train.max_iters'?"],
    "+train.eval_itersx=3": ["'train.eval_itersx'", "did you mean 'train.eval_iters'?"],
    "modle=gpt2": ["'modle'", "did you mean 'model'?"],
    "train.batch_size=5": ["did you mean 'model.batch_size'?"],
    "model=gtp2": ["model=gtp2", "did you mean 'gpt2'?", "gpt2_medium", "nano"],
    "train.backend=FSPD": ["train.backend=FSPD", "unknown backend; did you mean 'FSDP'?", "DDP"],
    "experiment=shakspeare": ["experiment=shakspeare", "did you mean 'shakespeare'?"],
    "train.log_interval=abc": ["train.log_interval=abc", "a whole number"],
    "train.eval_interval=2.5": ["train.eval_interval=2.5", "a whole number"],
    "train.max_iters=1e3": ["train.max_iters=1e3: write 1000, without a point or an exponent"],
    "train.device=gpu": ["train.device=gpu", "did you mean 'cuda'?"],
    "lr=1e-3": ["unknown option 'lr'; did you mean 'optimizer.learning_rate'?"],
    "train.lr=1e-3": ["unknown option 'train.lr'; did you mean 'optimizer.learning_rate'?"],
    "seed=3": ["unknown option 'seed'; did you mean 'train.seed'?"],
    "model.num_layers=3": ["did you mean 'model.n_layer'?"],
    "model.n_kv_heads=3": ["unknown option 'model.n_kv_heads'; did you mean 'model.n_kv_head'?"],
    "model.experts=3": ["unknown option 'model.experts'; wordrun --help model lists the options"],
    "nonsense=3": ["unknown option 'nonsense'; wordrun --help lists the options"],
    "profiler.steps=3": ["unknown option 'profiler.steps'; wordrun --help profiler lists the options"],
    "optimizer.learning_rate=fast": ["optimizer.learning_rate=fast", "a number"],
    "train.compile=maybe": ["train.compile=maybe", "true, false or auto"],
    "train=null": ["train=null", "train=NAME"],
    "+foo.bar=1": ["'foo"],
    "output_dir=here": ["did you mean 'hydra.run.dir'?"],
    "novalue": ["'novalue'", "KEY=VALUE"],
    "model.n_head=3": ["model.n_embd=128", "model.n_head=3", "n_embd=126 or 129"],
}  # the last one composes, and is wrong all the same


@pytest.fixture(scope="module")
def together() -> list[str]:
    """What a user is told who makes all the mistakes of ``UNKNOWN`` at once."""
    return complaints(lambda: compose(list(UNKNOWN)))


@pytest.mark.parametrize(("override", "says"), UNKNOWN.items())
def test_all_mistakes_are_reported_together(override: str, says: list[str], together: list[str]) -> None:
    (line,) = [line for line in together if all(text in line for text in says)]
    assert line


def test_no_mistake_is_reported_twice(together: list[str]) -> None:
    assert len(together) == len(UNKNOWN)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("++train.max_iter=3", ["'train.max_iter'", "did you mean 'train.max_iters'?"]),
        ("train.max_iters=null", ["train.max_iters=null", "omit it"]),
        ("tracker.wandb.tags=a", ["tracker.wandb.tags=a", "list"]),
        ("tracker.wandb.projct=a", ["'tracker.wandb.projct'", "did you mean 'tracker.wandb.project'?"]),
        ("tracker=[wadb,jsonl]", ["tracker=[wadb,jsonl]", "did you mean 'wandb'?"]),
        ("hooks=[early_stopp]", ["hooks=[early_stopp]", "did you mean 'early_stop'?"]),
        ("hooks.early_stop.patience=2", ["hooks.early_stop.patience=2", "hooks=[early_stop]"]),
        ("+tracker.foo.bar=1", ["'tracker.foo.bar'"]),
        ("~tracker.jsonl", ["tracker must include jsonl"]),
        ("run_dir=here", ["run_dir=here", "hydra.run.dir=here"]),
        ("hydra.run.dir=", ["hydra.run.dir"]),
        ("train.resume=true", ["train.resume=true", "train.resume=outputs/latest", "train.resume=auto"]),
        ("train.resume=outputs/latest", ["outputs/latest does not exist: no run has been started in this folder"]),
        ("train.sample_prompt=Größe", ["train.sample_prompt=Größe", "quote"]),
        ("tracker.wandb.mode=onlin", ["tracker.wandb.mode=onlin", "did you mean 'online'?"]),
    ],
)
def test_one_mistake_is_one_line(override: str, says: list[str]) -> None:
    (line,) = complaints(lambda: compose([override]))
    assert [text for text in says if text not in line] == []


def test_the_number_of_ranks_takes_part() -> None:
    (line,) = complaints(lambda: compose(["train.global_batch_size=48"], ranks=2))
    assert "train.global_batch_size=48" in line
    assert compose(["train.global_batch_size=48"], ranks=1).train.global_batch_size == 48


# What composes, but cannot be: change, and what the message has to contain

IMPOSSIBLE: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__n_head": 0}, ["model.n_head=0", "at least 1"]),
    ({"model__n_layer": 10**8}, ["model.n_layer=100000000 should be at most 10000"]),
    ({"model__n_embd": 3}, ["model.n_embd=3", "model.n_head=4", "n_embd=4"]),
    ({"model__vocab_size": 0}, ["model.vocab_size=0", "at least 1"]),
    ({"model__dropout": 1.0}, ["model.dropout=1.0", "less than 1"]),
    ({"model__dropout": math.nan}, ["model.dropout=nan"]),
    ({"model": GPTConfig(gelu="tahn")}, ["model.gelu=tahn", "did you mean 'tanh'?", "none"]),
    ({"model": LlamaConfig(n_kv_head=3)}, ["model.n_kv_head=3", "model.n_head=4", "use model.n_kv_head=2"]),
    ({"model": LlamaConfig(n_kv_head=8)}, ["model.n_kv_head=8", "model.n_head=4", "use model.n_kv_head=4"]),
    ({"model": LlamaConfig(n_kv_head=0)}, ["model.n_kv_head=0", "at least 1"]),
    ({"model": LlamaConfig(n_hidden=0)}, ["model.n_hidden=0", "at least 1"]),
    ({"model": LlamaConfig(n_embd=12)}, ["model.n_embd=12", "heads of 3", "use model.n_embd=16"]),
    ({"model": LlamaConfig(rope_theta=0.0)}, ["model.rope_theta=0.0", "above 0"]),
    ({"model": LlamaConfig(rope_factor=0.5)}, ["model.rope_factor=0.5", "at least 1"]),
    ({"model": LlamaConfig(norm_eps=math.nan)}, ["model.norm_eps=nan"]),
    ({"data__kind": "flie"}, ["data.kind=flie", "did you mean 'file'?"]),
    ({"data__kind": "file"}, ["data=sample", "data.path=FILE"]),
    ({"data__kind": "download", "data__path": "a.txt"}, ["data.url", "data.sha256"]),
    ({"data__offline": "smaple"}, ["data.offline=smaple", "did you mean 'sample'?"]),
    ({"data__val_fraction": 1.0}, ["data.val_fraction=1.0", "between 0 and 1"]),
    ({"data__kind": "hf"}, ["data=sample", "data.dataset=NAME"]),
    ({"data__kind": "shards"}, ["data=sample", "data.path=FOLDER"]),
    ({"data__kind": "mix"}, ["data=mix", "data.mix={fineweb: 3"]),
    ({"data__mix": {"a": 1.0}}, ["data.mix", "data=mix", "data=sample"]),
    ({"data": TextConfig("mix", "mix", mix={"a": 1.0, "b": 0.0})}, ["data.mix.b=0", "above 0"]),
    ({"data": TextConfig("mix", "mix", mix={"a": 1.0, "b": 1e-5})}, ["data.mix.b=1e-05", "raise it to 0.000244"]),
    ({"data__shard_mb": 0}, ["data.shard_mb=0", "at least 1"]),
    ({"data__workers": 0}, ["data.workers=0", "at least 1"]),
    ({"data__prefetch": -1}, ["data.prefetch=-1", "negative"]),
    ({"tokenizer__name": "cahr"}, ["tokenizer.name=cahr", "did you mean 'char'?"]),
    ({"tokenizer": BPETokenizerConfig(vocab_size=100)}, ["tokenizer.vocab_size=100", "at least 257"]),
    ({"tokenizer": HFTokenizerConfig()}, ["tokenizer=hf", "tokenizer.path=FOLDER"]),
    ({"optimizer__scale_lr": "liner"}, ["optimizer.scale_lr=liner", "did you mean 'linear'?"]),
    ({"train__accumulation": 0}, ["train.accumulation=0", "at least 1"]),
    ({"optimizer__learning_rate": 0.0}, ["optimizer.learning_rate=0.0", "above 0"]),
    ({"optimizer__learning_rate": math.nan}, ["optimizer.learning_rate=nan"]),
    ({"optimizer__min_lr": 1.0}, ["optimizer.min_lr=1.0", "optimizer.learning_rate=0.001"]),
    ({"optimizer__beta2": 1.0}, ["optimizer.beta2=1.0", "less than 1"]),
    ({"optimizer__weight_decay": math.nan}, ["optimizer.weight_decay=nan"]),
    ({"optimizer__grad_clip": -1.0}, ["optimizer.grad_clip=-1.0", "negative"]),
    ({"train__max_iters": 0}, ["train.max_iters=0", "at least 1"]),
    ({"train__eval_iters": 0}, ["train.eval_iters=0", "at least 1"]),
    ({"train__eval_interval": -1}, ["train.eval_interval=-1", "negative"]),
    ({"train__seed": -1}, ["train.seed=-1", "negative"]),
    ({"train__temperature": 0.0}, ["train.temperature=0.0", "above 0"]),
    ({"train__temperature": math.nan}, ["train.temperature=nan"]),
    ({"train__sample_prompt": ""}, ["train.sample_prompt", "line break"]),
    ({"train__dtype": "bf61"}, ["train.dtype=bf61", "did you mean 'bf16'?", "fp32"]),
    ({"train__device": "gpu"}, ["train.device=gpu", "cuda"]),
    ({"train__backend": "FSPD"}, ["train.backend=FSPD", "DDP"]),
    ({"backend__name": "FSDP"}, ["train.backend=DDP", "backend=FSDP"]),
    ({"train__global_batch_size": 25}, ["train.global_batch_size=25", "model.batch_size=12", "use 24"]),
    ({"train__global_batch_size": 0}, ["train.global_batch_size=0", "use 12"]),
    (
        {"train__global_batch_size": 24, "train__accumulation": 3},
        ["train.global_batch_size=24", "2 micro-steps", "accumulation=3"],
    ),
]


@pytest.mark.parametrize(("changes", "says"), IMPOSSIBLE, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_the_impossible_is_refused_with_key_value_and_remedy(changes: dict[str, Any], says: list[str]) -> None:
    (line,) = complaints(lambda: check(good(**changes), ranks=1))
    assert [text for text in says if text not in line] == []


# What tensor-parallel ranks cannot share: model, ranks, and for each message what it has to contain
INDIVISIBLE: list[tuple[TransformerConfig, int, list[list[str]]]] = [
    (LlamaConfig(n_head=6, n_embd=96, n_kv_head=3), 2, [["model.n_kv_head=3", "use model.n_kv_head=6"]]),
    (LlamaConfig(n_hidden=351), 2, [["model.n_hidden=351", "use model.n_hidden=352"]]),
    (LlamaConfig(n_kv_head=2), 4, [["model.n_kv_head=2", "use model.n_kv_head=4"]]),
    (LlamaConfig(vocab_size=65), 2, [["model.vocab_size=65", "use model.vocab_size=66"]]),
    (LlamaConfig(n_head=1, n_hidden=1), 2, [["model.n_head=1", "=2"], ["model.n_hidden=1", "=2"]]),
    (GPTConfig(n_head=2), 4, [["model.n_head=2", "use model.n_head=4"]]),
]


@pytest.mark.parametrize(("shapes", "ranks", "says"), INDIVISIBLE)
def test_what_tensor_parallel_ranks_cannot_share_is_refused(
    shapes: TransformerConfig, ranks: int, says: list[list[str]]
) -> None:
    cfg = good(model=shapes, backend=TPConfig(), train__backend="TP")
    lines = complaints(lambda: check(cfg, ranks))
    assert len(lines) == len(says)
    for line, texts in zip(lines, says, strict=True):
        assert [text for text in (*texts, f"backend.tp={ranks}") if text not in line] == []


def test_llamas_heads_can_be_shared() -> None:
    cfg = good(model=LlamaConfig(n_kv_head=2), backend=TPConfig(), train__backend="TP")
    assert check(cfg, 2).tp == 2


def test_an_option_of_another_model_is_refused() -> None:
    """LLaMA has no biases and no GELU, and GPT no heads of keys; no such option is dropped without a word."""
    for preset, option in (("llama_debug", "bias=true"), ("llama_debug", "gelu=tanh"), ("nano", "n_kv_head=2")):
        (line,) = complaints(lambda words=(f"model={preset}", f"model.{option}"): compose(words))
        assert line.startswith(f"unknown option 'model.{option.partition('=')[0]}'")


def test_what_is_possible_passes() -> None:
    check(good())
    check(good(train__global_batch_size=48, train__accumulation=2), ranks=2)


def test_the_trackers_mode_is_checked() -> None:
    cfg = good()
    cfg.tracker["wandb"] = WandbConfig(mode="of")
    assert "tracker.wandb.mode=of" in complaints(lambda: check(cfg))[0]
    cfg.tracker = {"jsonl": TrackerConfig(), "wandb": TrackerConfig(), "wadb": TrackerConfig()}
    assert complaints(lambda: check(cfg)) == [
        "tracker.wandb has the options of TrackerConfig: use WandbConfig",
        "tracker=wadb should be one of jsonl, wandb, tensorboard, mlflow, trackio; did you mean 'wandb'?",
    ]


@pytest.mark.parametrize(
    ("whole", "gas", "ranks", "micro_steps"), [(None, None, 1, 1), (None, 3, 4, 3), (96, None, 1, 8), (96, None, 4, 2)]
)
def test_the_global_batch_sets_the_accumulation(
    whole: int | None, gas: int | None, ranks: int, micro_steps: int
) -> None:
    assert accumulation(good(train__global_batch_size=whole, train__accumulation=gas), ranks) == micro_steps


def test_the_older_name_of_the_accumulation_is_accepted() -> None:
    cfg = compose(["data=sample", "optimizer.gas=3", "tracker=jsonl"])
    assert (cfg.train.accumulation, cfg.optimizer.gas, accumulation(cfg, 2)) == (3, None, 3)
    saved = to_plain(cfg)
    saved["optimizer"]["gas"], saved["train"]["accumulation"] = 5, None  # of a run of an earlier version
    assert from_plain(saved).train.accumulation == 5
    saved["train"]["accumulation"] = 2
    with pytest.raises(ConfigError, match=r"accumulation=2, but optimizer\.gas=5, its older name: omit"):
        from_plain(saved)


def test_the_nearest_name_is_told_in_its_own_spelling() -> None:
    assert nearest("fspd", ["DDP", "FSDP"]) == "; did you mean 'FSDP'?"
    assert nearest("zebra", ["DDP", "FSDP"]) == ""


def test_a_long_list_of_names_is_below_the_message() -> None:
    (message,) = complaints(lambda: compose(["data=shakespear"]))
    line, *names = message.splitlines()
    assert line == "data=shakespear: unknown data; did you mean 'shakespeare'?"
    assert names[0].startswith("  (chat, cifar10, digits, ")
    assert names[-1].endswith(", yelp)")


def test_other_names_lead_to_options_that_exist() -> None:
    from wordrun.config.schema import schemas

    keys = {
        f"{group}.{field.name}"
        for group in SECTIONS
        if group not in SEVERAL
        for part in schemas(group).values()
        for field in fields(part.options)
    }
    assert {*suggestions.OPTIONS.values()} - keys - {*SECTIONS, "hydra.run.dir"} == set()


def test_every_kind_of_part_is_a_section() -> None:
    assert {*KINDS, "train"} == set(SECTIONS)


@pytest.mark.parametrize("override", ["hydra.verbose=true", "hydra.job.chdir=true", "hydra/job_logging=none"])
def test_a_setting_of_hydra_that_a_run_ignores_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(override)} has no effect on a run.*hydra\.run\.dir"):
        compose(["data=sample", override])


def test_an_experiment_that_is_no_yaml_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n\tmax_iters: 3\n")
    with pytest.raises(ConfigError, match=r"experiment=mine: the file is not valid YAML: .*mine\.yaml.*line 3"):
        compose(["experiment=mine"], tree=Tree(extra_dir=str(tmp_path)))


TYPED = ("1e5", "007", "1_0", "4e10", "12e45678", "0x1F", "1.10", "true", "NO", "on", "12:30:00", "2024-01-01", "+1")
"""Which YAML or Hydra read as something else."""


def an_experiment(folder: Path, text: str, name: str = "mine") -> Tree:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    return Tree(extra_dir=str(folder))


def test_an_option_of_type_str_is_what_was_typed() -> None:
    tags = ",".join(TYPED)
    cfg = compose(
        [
            "data=sample",
            "tracker=wandb",
            "data.name=007",
            "tracker.wandb.group=1e5",
            "hydra.run.dir=1e3",
            f"tracker.wandb.tags=[{tags}]",
            "optimizer.learning_rate=1e-3",
            "train.compile=true",
        ]
    )
    wandb: Any = cfg.tracker["wandb"]
    assert (cfg.data.name, wandb.group, cfg.run_dir, wandb.tags) == ("007", "1e5", "1e3", list(TYPED))
    assert (cfg.optimizer.learning_rate, cfg.train.compile) == (1e-3, True)


def test_an_option_of_type_str_in_a_file_is_what_was_typed(tmp_path: Path) -> None:
    tags = ", ".join(TYPED)
    tree = an_experiment(
        tmp_path,
        f"""
defaults: [{{override /tracker: wandb}}, {{override /data: sample}}]
data: {{name: 007}}
tracker: {{wandb: {{group: 1e5, tags: [{tags}, null_, "1e3"]}}}}
train: {{max_iters: 1_0, seed: 0x1F, compile: yes}}
optimizer: {{learning_rate: 1e-3}}
""",
    )
    cfg = compose(["experiment=mine"], tree=tree)
    wandb: Any = cfg.tracker["wandb"]
    assert (cfg.data.name, wandb.group, wandb.tags) == ("007", "1e5", [*TYPED, "null_", "1e3"])
    assert (cfg.train.max_iters, cfg.train.seed, cfg.train.compile, cfg.optimizer.learning_rate) == (10, 31, True, 1e-3)


@pytest.mark.parametrize(
    ("typed_values", "points"),
    [
        ("1e3,007,true", ["1e3", "007", "true"]),
        ("choice(1e3,1e4,a)", ["1e3", "1e4", "a"]),
        ('choice("1e3",2)', ["1e3", "2"]),
        ("range(1,3)", ["1", "2"]),
    ],
)
def test_the_points_of_a_sweep_have_what_was_typed(typed_values: str, points: list[str]) -> None:
    words = typed(["data=sample", f"data.name={typed_values}", "train.seed=1,2"], ["data=sample"], Tree())
    names = {compose(point).data.name: None for point in sweep_points(words)}
    assert list(names) == points


def test_a_wrong_type_in_a_file_is_one_message_with_the_file(tmp_path: Path) -> None:
    tree = an_experiment(tmp_path, "train: {max_iters: 1e3, eval_iters: 1.50}\n")
    assert complaints(lambda: compose(["experiment=mine"], tree=tree)) == [
        "in experiment/mine.yaml: train.max_iters=1e3: write 1000, without a point or an exponent",
        "in experiment/mine.yaml: train.eval_iters=1.50 should be a whole number",
    ]


def test_a_file_that_stands_for_too_much_is_refused(tmp_path: Path) -> None:
    lines = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(9)]
    tree = an_experiment(tmp_path, "\n".join(lines))
    (line,) = complaints(lambda: compose(["experiment=mine"], tree=tree))
    assert re.search(r"mine\.yaml: its aliases .* stand for .* more than the 100,000", line)
    (line,) = complaints(lambda: compose(["experiment=mine"], tree=an_experiment(tmp_path, "a: &a [*a]\n")))
    assert "contains itself" in line


def test_config_files_that_name_each_other_are_refused(tmp_path: Path) -> None:
    an_experiment(tmp_path, "defaults: [other]\n")
    tree = an_experiment(tmp_path, "defaults: [mine]\n", "other")
    (line,) = complaints(lambda: compose(["data=sample", "experiment=mine"], tree=tree))
    assert line.startswith("experiment=mine: ")
    assert "name each other" in line


def test_a_whole_number_beyond_64_bits_is_refused() -> None:
    large = "9" * 23
    lines = complaints(lambda: compose(["data=sample", f"train.max_iters={large}", f"model.n_embd=-{large}"]))
    largest = "the largest value is 9223372036854775807"
    assert {f"train.max_iters={large}: {largest}", f"model.n_embd=-{large}: {largest}"} <= {*lines}


def test_an_experiment_may_suit_a_backend_that_is_chosen_after_it(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbackend:\n  sync_every: 7\n")
    words = ["experiment=mine", "train.backend=diloco", "train.nope=1"]
    (line,) = complaints(lambda: compose(words, tree=Tree(extra_dir=str(tmp_path))))
    assert line.startswith("unknown option 'train.nope'")


def test_a_typo_in_an_experiment_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain:\n  max_itrs: 3\n")
    with pytest.raises(ConfigError, match=r"experiment=mine: .*max_itrs"):
        compose(["experiment=mine"], tree=Tree(extra_dir=str(tmp_path)))


def test_an_option_of_a_file_chosen_after_it_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["profiler.interval_s=0.01", "profiler=pyinstrument", "train.typo=1"])
    assert str(caught.value).startswith("unknown option 'train.typo'")
    assert "interval_s" not in str(caught.value)


def test_a_list_of_values_without_m_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"train\.seed=1,2: for a sweep over several values add -m"):
        compose(["train.seed=1,2"])


@pytest.mark.parametrize("words", ["hooks=[1]", "metrics=[null]", "metrics=[{a:1}]"])
def test_a_list_of_parts_takes_names_only(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{words} should be a list of names: ")):
        compose([words])


def test_depth_sets_rates_and_batch_unless_they_are_set() -> None:
    words = ["model=modern", "model.depth=3"]
    cfg = compose(words)
    assert isinstance(cfg.optimizer, MuonConfig)
    assert cfg.optimizer.learning_rate == pytest.approx(0.004 * math.sqrt(768 / 256))
    assert cfg.optimizer.adamw_lr is None, "the same"
    assert accumulation(cfg, 2) == round(2**17 / 128 / (2 * cfg.model.batch_size))
    cfg = compose([*words, "optimizer.learning_rate=0.01", "train.global_batch_size=32"])
    assert isinstance(cfg.optimizer, MuonConfig)
    assert cfg.optimizer.learning_rate == 0.01
    assert accumulation(cfg, 2) == 1
    cfg = compose(["model=gpt2", "optimizer=muon"])
    assert (cfg.optimizer.learning_rate, accumulation(cfg, 2)) == (1e-3, 1)


@pytest.mark.parametrize("backend", ["DDP", "FSDP", "TP", "PP", "3D", "diloco", "deepspeed"])
def test_the_default_is_a_recipe_on_every_backend(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    cfg = compose([f"train.backend={backend}"], ranks=4)
    chosen = (cfg.model.name, cfg.optimizer.name, cfg.schedule.name, cfg.train.compile)
    assert chosen == ("modern", "adamw" if backend == "deepspeed" else "muon", "linear", "auto")
    assert cfg.model.zero_init == (backend != "deepspeed")  # AdamW learns slowly from projections of zeros
    why = ["optimizer=adamw, because train.backend=deepspeed does not support optimizer=muon, the default"]
    assert caplog.messages == (why if backend == "deepspeed" else [])


@pytest.mark.parametrize("words", ["optimizer=muon", "experiment=fastest", "optimizer.momentum=0.9"])
def test_only_an_optimizer_that_nobody_chose_is_replaced(words: str) -> None:
    with pytest.raises(ConfigError, match="optimizer=muon needs whole matrices"):
        compose(["train.backend=deepspeed", words])


def test_options_that_the_default_model_lacks_choose_nanogpts(caplog: pytest.LogCaptureFixture) -> None:
    cfg = compose(["model.bias=true", "model.gelu=tanh", "model.n_layer=2", "optimizer.beta1=0.8"])
    assert (type(cfg.model), cfg.model.n_layer, cfg.optimizer.name, cfg.schedule.name) == (
        GPTConfig,
        2,
        "adamw",
        "cosine",
    )
    assert caplog.messages == ["model=nano, because the default, model=modern, has no model.bias and no model.gelu"]
    caplog.clear()
    for words in (["model.bias=false", "model.dropout=0.1", "optimizer.beta1=0.8"], ["model=nano", "model.bias=true"]):
        assert compose(words).model.name == ("nano" if "model=nano" in words else "modern")
    assert compose(["experiment=shakespeare", "model.bias=true"]).optimizer.name == "adamw"
    assert not caplog.messages
