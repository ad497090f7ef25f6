"""The config, with the base classes of options from which a project derives its own.

The options of each part stand beside the part, in an ``options.py``; this package composes, validates and registers.
"""

from wordrun.common.lazy import offers

__getattr__ = offers(
    __name__,
    {
        "wordrun.backend.deepspeed.options": "DeepSpeedConfig",
        "wordrun.backend.diloco.options": "DilocoConfig",
        "wordrun.backend.options": "BackendConfig DDPConfig FSDPConfig PPConfig TPConfig ThreeDConfig",
        "wordrun.data.options": "DataConfig FakeImagesConfig ImageFolderConfig ImagesConfig TextConfig",
        "wordrun.data.tokenizers.options": (
            "BPETokenizerConfig ByteTokenizerConfig CharTokenizerConfig GPT2TokenizerConfig HFTokenizerConfig "
            "TokenizerConfig"
        ),
        "wordrun.model.options": (
            "ConvNetConfig GPTConfig LlamaConfig MoEConfig ModelConfig ModernConfig ResNetConfig TextModelConfig "
            "TransformerConfig"
        ),
        "wordrun.track.options": "MlflowConfig TensorBoardConfig TrackerConfig TrackioConfig WandbConfig",
        "wordrun.train.hooks.options": (
            "CoordinatesConfig EMAConfig EarlyStopConfig HookConfig LRRangeConfig SpikesConfig StatisticsConfig"
        ),
        "wordrun.train.optim.options": "AdamWConfig LionConfig MuonConfig OptimizerConfig SGDConfig",
        "wordrun.train.options": (
            "AccuracyConfig LinearScheduleConfig MemoryProfilerConfig MetricConfig ProfilerConfig "
            "PyinstrumentConfig ScheduleConfig ScheduledProfilerConfig SpansProfilerConfig TopKConfig "
            "TorchProfilerConfig TrainConfig"
        ),
        "wordrun.config.schema": "Config",
        "wordrun.common.section": "Section",
    },
)
