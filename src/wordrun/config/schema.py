"""The schema: every option with its type, default, unit and meaning. YAML files under conf/ hold only differences.

``wordrun --help`` and docs/reference.md are made from the text under each field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from wordrun.backend.options import BackendConfig
from wordrun.common.errors import ConfigError, UserError
from wordrun.common.section import Freezable, Section, field_types, fits
from wordrun.common.suggestions import nearest
from wordrun.config.registry import Part, part_of, parts
from wordrun.data.options import DataConfig, TextConfig
from wordrun.data.tokenizers.options import CharTokenizerConfig, TokenizerConfig
from wordrun.model.options import ModelConfig, TextModelConfig, TransformerConfig
from wordrun.track.options import TrackerConfig
from wordrun.train.hooks.options import HookConfig
from wordrun.train.optim.options import OptimizerConfig
from wordrun.train.options import MetricConfig, ProfilerConfig, ScheduleConfig, TrainConfig


@dataclass
class Config(Freezable):
    """Everything that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=CharTokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tracker: dict[str, TrackerConfig] = field(default_factory=lambda: {"jsonl": TrackerConfig()})
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    hooks: dict[str, HookConfig] = field(default_factory=dict)
    metrics: dict[str, MetricConfig] = field(default_factory=dict)
    run_dir: str = ""
    """Where the run writes; comes from hydra.run.dir=DIR."""
    secrets: dict[tuple[str, ...], Any] = field(default_factory=dict, metadata={"omegaconf_ignore": True})
    """Maps each option whose value comes from a secret environment variable to what was written for it, such as
    ${oc.env:API_KEY}. Records have this text instead of the value."""

    @property
    def transformer(self) -> TransformerConfig:
        """The model's options, for code about transformers."""
        assert isinstance(self.model, TransformerConfig)
        return self.model

    @property
    def text_model(self) -> TextModelConfig:
        """The model's options, for code about models of text."""
        assert isinstance(self.model, TextModelConfig)
        return self.model

    @property
    def lora_rank(self) -> int:
        """The rank of LoRA's adapters; 0: there are none."""
        return self.model.lora_rank if isinstance(self.model, TransformerConfig) else 0

    @property
    def text(self) -> TextConfig:
        """The data's options, for code about text."""
        assert isinstance(self.data, TextConfig)
        return self.data


TRAIN = {"default": Part(TrainConfig, "wordrun.train.trainer:Trainer")}


def schemas(group: str) -> dict[str, Part]:
    """Return the parts whose dataclasses are the schemas of a config group, by the name of the schema.

    An option file under conf/GROUP begins with one of them.
    """
    if group == "train":
        return TRAIN
    found = parts(group)
    if group != "data":
        return found
    text = found["file"]  # all kinds of text share one schema, with data.kind as an option
    return {"text": text, **{name: part for name, part in found.items() if part.declared != text.declared}}


OLDER = {"optimizer.gas": "train.accumulation"}
"""Older names that stay accepted."""

SECTIONS = tuple(f.name for f in fields(Config) if f.name not in ("run_dir", "secrets"))
SEVERAL = ("tracker", "hooks", "metrics")
"""Sections of which a run can have several parts: mappings from the name of a part to its options."""


def parts_in(cfg: Any) -> dict[str, Any]:
    """Return the options of each part by the prefix of their names, such as ``model`` and ``tracker.wandb``.

    ``cfg`` is a Config, or a composed tree that becomes one.
    """
    found = {section: getattr(cfg, section) for section in SECTIONS}
    for section in SEVERAL:
        found |= {f"{section}.{name}": options for name, options in found.pop(section).items()}
    return found


def as_dict(cfg: Config) -> dict[str, Any]:
    """Return ``cfg`` as dictionaries for records, in which no value is a secret."""
    values = asdict(cfg)
    for (*path, last), written in values.pop("secrets").items():
        options = values
        for key in path:
            options = options[key]
        options[last] = written
    return values


def to_plain(cfg: Config) -> dict[str, dict[str, Any]]:
    """Return ``cfg`` as dictionaries for JSON, each part of it with the name of its schema."""
    values = as_dict(cfg)

    def plain(section: str, options: Section, values: dict[str, Any]) -> dict[str, Any]:
        schema = next((name for name, part in schemas(section).items() if part.configures(options)), None)
        if schema is None:
            part_of(section, options)  # raises
        return {"schema": schema, **values}

    return {
        section: {name: plain(section, each, values[section][name]) for name, each in getattr(cfg, section).items()}
        if section in SEVERAL
        else plain(section, getattr(cfg, section), values[section])
        for section in SECTIONS
    }


def with_accumulation(cfg: Config) -> Config:
    """Return ``cfg`` with the value of ``optimizer.gas``, an older name, in ``train.accumulation``.

    Raises:
        ConfigError: both are set, to different values.
    """
    older, newer = cfg.optimizer.gas, cfg.train.accumulation
    if older is None:
        return cfg
    if newer not in (None, older):
        raise ConfigError(f"train.accumulation={newer}, but optimizer.gas={older}, its older name: omit optimizer.gas")
    train, optimizer = replace(cfg.train, accumulation=older), replace(cfg.optimizer, gas=None)
    return replace(cfg, train=train, optimizer=optimizer)


def from_plain(plain: dict[str, dict[str, Any]]) -> Config:
    """Return the Config that ``to_plain`` converted; newer options have their defaults.

    Raises:
        UserError: it has options that this version does not know, or values of the wrong type.
    """
    cfg = Config()
    for section, values in plain.items():
        if section not in SEVERAL:
            setattr(cfg, section, _section_from(section, section, values))
        else:
            parts = {name: _section_from(section, f"{section}.{name}", each) for name, each in values.items()}
            setattr(cfg, section, parts)
    return with_accumulation(cfg)


def _section_from(section: str, prefix: str, values: dict[str, Any]) -> Section:
    schema = values["schema"]
    values = {name: value for name, value in values.items() if name != "schema"}
    known = schemas(section) if section in SECTIONS else {}
    if known and schema not in known:
        raise UserError(
            f"the config has {section}={schema}, which is not registered here{nearest(schema, known)}: use a version "
            "of wordrun that has it, or, for your own part, run in its project's folder or install its package"
        )
    cls = known[schema].options if known else None
    unknown = set(values) - {f.name for f in fields(cls)} if cls else {"*"}
    if cls is None or unknown:
        raise UserError(
            f"the config has {', '.join(f'{prefix}.{name}' for name in sorted(unknown))}, which this version of "
            "wordrun does not know: use the one that wrote it, or a newer one"
        )
    kinds = field_types(cls)  # type: ignore[arg-type]
    for name, value in values.items():
        if not fits(value, kinds[name]):
            kind = kinds[name].__name__ if isinstance(kinds[name], type) else kinds[name]
            raise UserError(f"the config has {prefix}.{name}={value!r:.100}, which should be of type {kind}")
    options: Section = cls(**values)
    return options
