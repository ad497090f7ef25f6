"""wordrun's own parts, registered as those of any other package: a line for each, and nothing is imported."""

from wordrun.config import registry


def register(kind: str, name: str, options: str, implementation: str) -> None:
    """Register a part of this package, whose modules are named without ``wordrun.``."""
    registry.register(kind, name, f"wordrun.{options}", f"wordrun.{implementation}")


register("model", "gpt", "model.options:GPTConfig", "model.gpt:GPT")
register("model", "llama", "model.options:LlamaConfig", "model.llama:Llama")
register("model", "moe", "model.options:MoEConfig", "model.moe:MixtureOfExperts")
register("model", "modern", "model.options:ModernConfig", "model.modern:Modern")
register("model", "hf", "model.options:HFConfig", "model.hf:HFModel")
register("model", "convnet", "model.options:ConvNetConfig", "model.images:ConvNet")
register("model", "resnet", "model.options:ResNetConfig", "model.images:ResNet")

register("tokenizer", "char", "data.tokenizers.options:CharTokenizerConfig", "data.tokenizers.char:CharTokenizer")
register("tokenizer", "byte", "data.tokenizers.options:ByteTokenizerConfig", "data.tokenizers.char:ByteTokenizer")
register("tokenizer", "gpt2", "data.tokenizers.options:GPT2TokenizerConfig", "data.tokenizers.subword:GPT2Tokenizer")
register("tokenizer", "bpe", "data.tokenizers.options:BPETokenizerConfig", "data.tokenizers.subword:BPETokenizer")
register("tokenizer", "hf", "data.tokenizers.options:HFTokenizerConfig", "data.tokenizers.subword:HFTokenizer")

register("data", "file", "data.options:TextConfig", "data.prepare.sources.files:FileSource")
register("data", "download", "data.options:TextConfig", "data.prepare.sources.download:DownloadSource")
register("data", "sample", "data.options:TextConfig", "data.prepare.sources.sample:SampleSource")
register("data", "hf", "data.options:TextConfig", "data.prepare.sources.hub:HubSource")
register("data", "shards", "data.options:TextConfig", "data.prepare.sources.shards:ShardSource")
register("data", "pairs", "data.options:TextConfig", "data.prepare.sources.chat:ChatSource")
register("data", "chat", "data.options:TextConfig", "data.prepare.sources.chat:ChatSource")
register("data", "digits", "data.options:ImagesConfig", "data.images:digits")
register("data", "mnist", "data.options:ImagesConfig", "data.prepare.vision:mnist")
register("data", "cifar10", "data.options:ImagesConfig", "data.prepare.vision:cifar10")
register("data", "imagefolder", "data.options:ImageFolderConfig", "data.images:imagefolder")
register("data", "fake_images", "data.options:FakeImagesConfig", "data.images:fake_images")

register("backend", "DDP", "backend.options:DDPConfig", "backend.ddp:DDPBackend")
register("backend", "FSDP", "backend.options:FSDPConfig", "backend.fsdp:FSDPBackend")
register("backend", "TP", "backend.options:TPConfig", "backend.fsdp:FSDPBackend")
register("backend", "PP", "backend.options:PPConfig", "backend.pipeline:PipelineBackend")
register("backend", "3D", "backend.options:ThreeDConfig", "backend.pipeline:PipelineBackend")
register(
    "backend", "deepspeed", "backend.deepspeed.options:DeepSpeedConfig", "backend.deepspeed.engine:DeepSpeedBackend"
)
register("backend", "diloco", "backend.diloco.options:DilocoConfig", "backend.diloco.engine:diloco")

register("optimizer", "adamw", "train.optim.options:AdamWConfig", "train.optim.adamw:adamw")
register("optimizer", "muon", "train.optim.options:MuonConfig", "train.optim.muon:Muon")
register("optimizer", "sgd", "train.optim.options:SGDConfig", "train.optim.sgd:sgd")
register("optimizer", "lion", "train.optim.options:LionConfig", "train.optim.lion:Lion")

register("schedule", "cosine", "train.options:ScheduleConfig", "train.schedule:cosine")
register("schedule", "linear", "train.options:LinearScheduleConfig", "train.schedule:linear")
register("schedule", "constant", "train.options:ScheduleConfig", "train.schedule:constant")

register("tracker", "jsonl", "track.options:TrackerConfig", "track.jsonl:JsonlTracker")
register("tracker", "wandb", "track.options:WandbConfig", "track.wandb:WandbTracker")
register("tracker", "tensorboard", "track.options:TensorBoardConfig", "track.tensorboard:TensorBoardTracker")
register("tracker", "mlflow", "track.options:MlflowConfig", "track.mlflow:MlflowTracker")
register("tracker", "trackio", "track.options:TrackioConfig", "track.trackio:TrackioTracker")

register("profiler", "none", "train.options:ProfilerConfig", "train.profile:Profiler")
register("profiler", "pyinstrument", "train.options:PyinstrumentConfig", "train.profile:PyinstrumentProfiler")
register("profiler", "torch", "train.options:TorchProfilerConfig", "train.profile:TorchProfiler")
register("profiler", "spans", "train.options:SpansProfilerConfig", "train.profile:SpansProfiler")
register("profiler", "memory", "train.options:MemoryProfilerConfig", "train.profile:MemoryProfiler")

register("metrics", "accuracy", "train.options:AccuracyConfig", "train.accuracy:accuracy")
register("metrics", "top5", "train.options:TopKConfig", "train.accuracy:top_k")

register("hooks", "early_stop", "train.hooks.options:EarlyStopConfig", "train.hooks.early_stop:EarlyStop")
register("hooks", "ema", "train.hooks.options:EMAConfig", "train.hooks.ema:EMA")
register("hooks", "statistics", "train.hooks.options:StatisticsConfig", "train.hooks.statistics:statistics")
register("hooks", "coordinates", "train.hooks.options:CoordinatesConfig", "train.hooks.coordinates:Coordinates")
register("hooks", "spikes", "train.hooks.options:SpikesConfig", "train.hooks.spikes:Spikes")
register("hooks", "lr_range", "train.hooks.options:LRRangeConfig", "train.hooks.lr_range:LRRange")
