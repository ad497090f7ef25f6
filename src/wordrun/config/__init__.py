"""The config, with the base classes of options from which a project derives its own.

The options of each part stand beside the part, in an ``options.py``; this package composes, validates and registers.
"""

from __future__ import annotations

from typing import Any

from wordrun.common.lazy import attribute

_HOMES = {
    "wordrun.backend.deepspeed.options": ("DeepSpeedConfig",),
    "wordrun.backend.diloco.options": ("DilocoConfig",),
    "wordrun.backend.options": (
        "BackendConfig",
        "DDPConfig",
        "FSDPConfig",
        "PPConfig",
        "TPConfig",
        "ThreeDConfig",
    ),
    "wordrun.data.options": (
        "DataConfig",
        "FakeImagesConfig",
        "ImageFolderConfig",
        "ImagesConfig",
        "TextConfig",
    ),
    "wordrun.data.tokenizers.options": (
        "BPETokenizerConfig",
        "ByteTokenizerConfig",
        "CharTokenizerConfig",
        "GPT2TokenizerConfig",
        "HFTokenizerConfig",
        "TokenizerConfig",
    ),
    "wordrun.model.options": (
        "ConvNetConfig",
        "GPTConfig",
        "LlamaConfig",
        "MoEConfig",
        "ModelConfig",
        "ModernConfig",
        "ResNetConfig",
        "TextModelConfig",
        "TransformerConfig",
    ),
    "wordrun.track.options": (
        "MlflowConfig",
        "TensorBoardConfig",
        "TrackerConfig",
        "TrackioConfig",
        "WandbConfig",
    ),
    "wordrun.train.hooks.options": (
        "CoordinatesConfig",
        "EMAConfig",
        "EarlyStopConfig",
        "HookConfig",
        "LRRangeConfig",
        "SpikesConfig",
        "StatisticsConfig",
    ),
    "wordrun.train.optim.options": (
        "AdamWConfig",
        "LionConfig",
        "MuonConfig",
        "OptimizerConfig",
        "SGDConfig",
    ),
    "wordrun.train.options": (
        "AccuracyConfig",
        "LinearScheduleConfig",
        "MemoryProfilerConfig",
        "MetricConfig",
        "ProfilerConfig",
        "PyinstrumentConfig",
        "ScheduleConfig",
        "ScheduledProfilerConfig",
        "SpansProfilerConfig",
        "TopKConfig",
        "TorchProfilerConfig",
        "TrainConfig",
    ),
}
"""The classes of options by the module that has them."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names} | {
    "Config": "wordrun.config.schema",
    "Section": "wordrun.common.section",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _HOME_OF)
