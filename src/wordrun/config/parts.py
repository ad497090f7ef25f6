"""wordrun's own parts, registered as those of any other package: a line for each, and nothing is imported."""

from wordrun.config.registry import register

register("model", "gpt", "wordrun.model.options:GPTConfig", "wordrun.model.gpt:GPT")
register("model", "llama", "wordrun.model.options:LlamaConfig", "wordrun.model.llama:Llama")
register("model", "moe", "wordrun.model.options:MoEConfig", "wordrun.model.moe:MixtureOfExperts")
register("model", "modern", "wordrun.model.options:ModernConfig", "wordrun.model.modern:Modern")
register("model", "hf", "wordrun.model.options:HFConfig", "wordrun.model.hf:HFModel")
register("model", "convnet", "wordrun.model.options:ConvNetConfig", "wordrun.model.images:ConvNet")
register("model", "resnet", "wordrun.model.options:ResNetConfig", "wordrun.model.images:ResNet")

register(
    "tokenizer",
    "char",
    "wordrun.data.tokenizers.options:CharTokenizerConfig",
    "wordrun.data.tokenizers.char:CharTokenizer",
)
register(
    "tokenizer",
    "byte",
    "wordrun.data.tokenizers.options:ByteTokenizerConfig",
    "wordrun.data.tokenizers.char:ByteTokenizer",
)
register(
    "tokenizer",
    "gpt2",
    "wordrun.data.tokenizers.options:GPT2TokenizerConfig",
    "wordrun.data.tokenizers.subword:GPT2Tokenizer",
)
register(
    "tokenizer",
    "bpe",
    "wordrun.data.tokenizers.options:BPETokenizerConfig",
    "wordrun.data.tokenizers.subword:BPETokenizer",
)
register(
    "tokenizer",
    "hf",
    "wordrun.data.tokenizers.options:HFTokenizerConfig",
    "wordrun.data.tokenizers.subword:HFTokenizer",
)

register("data", "file", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.files:FileSource")
register("data", "download", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.download:DownloadSource")
register("data", "sample", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.sample:SampleSource")
register("data", "hf", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.hub:HubSource")
register("data", "shards", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.shards:ShardSource")
register("data", "pairs", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.chat:ChatSource")
register("data", "chat", "wordrun.data.options:TextConfig", "wordrun.data.prepare.sources.chat:ChatSource")
register("data", "digits", "wordrun.data.options:ImagesConfig", "wordrun.data.images:digits")
register("data", "mnist", "wordrun.data.options:ImagesConfig", "wordrun.data.prepare.vision:mnist")
register("data", "cifar10", "wordrun.data.options:ImagesConfig", "wordrun.data.prepare.vision:cifar10")
register("data", "imagefolder", "wordrun.data.options:ImageFolderConfig", "wordrun.data.images:imagefolder")
register("data", "fake_images", "wordrun.data.options:FakeImagesConfig", "wordrun.data.images:fake_images")

register("backend", "DDP", "wordrun.backend.options:DDPConfig", "wordrun.backend.ddp:DDPBackend")
register("backend", "FSDP", "wordrun.backend.options:FSDPConfig", "wordrun.backend.fsdp:FSDPBackend")
register("backend", "TP", "wordrun.backend.options:TPConfig", "wordrun.backend.fsdp:FSDPBackend")
register("backend", "PP", "wordrun.backend.options:PPConfig", "wordrun.backend.pipeline:PipelineBackend")
register("backend", "3D", "wordrun.backend.options:ThreeDConfig", "wordrun.backend.pipeline:PipelineBackend")
register(
    "backend",
    "deepspeed",
    "wordrun.backend.deepspeed.options:DeepSpeedConfig",
    "wordrun.backend.deepspeed.engine:DeepSpeedBackend",
)
register("backend", "diloco", "wordrun.backend.diloco.options:DilocoConfig", "wordrun.backend.diloco.engine:diloco")

register("optimizer", "adamw", "wordrun.train.optim.options:AdamWConfig", "wordrun.train.optim.adamw:adamw")
register("optimizer", "muon", "wordrun.train.optim.options:MuonConfig", "wordrun.train.optim.muon:Muon")
register("optimizer", "sgd", "wordrun.train.optim.options:SGDConfig", "wordrun.train.optim.sgd:sgd")
register("optimizer", "lion", "wordrun.train.optim.options:LionConfig", "wordrun.train.optim.lion:Lion")

register("schedule", "cosine", "wordrun.train.options:ScheduleConfig", "wordrun.train.schedule:cosine")
register("schedule", "linear", "wordrun.train.options:LinearScheduleConfig", "wordrun.train.schedule:linear")
register("schedule", "constant", "wordrun.train.options:ScheduleConfig", "wordrun.train.schedule:constant")

register("tracker", "jsonl", "wordrun.track.options:TrackerConfig", "wordrun.track.jsonl:JsonlTracker")
register("tracker", "wandb", "wordrun.track.options:WandbConfig", "wordrun.track.wandb:WandbTracker")
register(
    "tracker", "tensorboard", "wordrun.track.options:TensorBoardConfig", "wordrun.track.tensorboard:TensorBoardTracker"
)
register("tracker", "mlflow", "wordrun.track.options:MlflowConfig", "wordrun.track.mlflow:MlflowTracker")
register("tracker", "trackio", "wordrun.track.options:TrackioConfig", "wordrun.track.trackio:TrackioTracker")

register("profiler", "none", "wordrun.train.options:ProfilerConfig", "wordrun.train.profile:Profiler")
register(
    "profiler", "pyinstrument", "wordrun.train.options:PyinstrumentConfig", "wordrun.train.profile:PyinstrumentProfiler"
)
register("profiler", "torch", "wordrun.train.options:TorchProfilerConfig", "wordrun.train.profile:TorchProfiler")
register("profiler", "spans", "wordrun.train.options:SpansProfilerConfig", "wordrun.train.profile:SpansProfiler")
register("profiler", "memory", "wordrun.train.options:MemoryProfilerConfig", "wordrun.train.profile:MemoryProfiler")

register("metrics", "accuracy", "wordrun.train.options:AccuracyConfig", "wordrun.train.accuracy:accuracy")
register("metrics", "top5", "wordrun.train.options:TopKConfig", "wordrun.train.accuracy:top_k")

register(
    "hooks", "early_stop", "wordrun.train.hooks.options:EarlyStopConfig", "wordrun.train.hooks.early_stop:EarlyStop"
)
register("hooks", "ema", "wordrun.train.hooks.options:EMAConfig", "wordrun.train.hooks.ema:EMA")
register(
    "hooks", "statistics", "wordrun.train.hooks.options:StatisticsConfig", "wordrun.train.hooks.statistics:statistics"
)
register(
    "hooks",
    "coordinates",
    "wordrun.train.hooks.options:CoordinatesConfig",
    "wordrun.train.hooks.coordinates:Coordinates",
)
register("hooks", "spikes", "wordrun.train.hooks.options:SpikesConfig", "wordrun.train.hooks.spikes:Spikes")
register("hooks", "lr_range", "wordrun.train.hooks.options:LRRangeConfig", "wordrun.train.hooks.lr_range:LRRange")
