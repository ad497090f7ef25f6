"""wordrun's own parts, registered as those of any other package: a line for each, and nothing is imported."""

from wordrun.registry import register

register("model", "gpt", "wordrun.config:GPTConfig", "wordrun.model.gpt:GPT")
register("model", "llama", "wordrun.config:LlamaConfig", "wordrun.model.llama:Llama")
register("model", "moe", "wordrun.config:MoEConfig", "wordrun.model.moe:MixtureOfExperts")
register("model", "modern", "wordrun.config:ModernConfig", "wordrun.model.modern:Modern")
register("model", "convnet", "wordrun.config_images:ConvNetConfig", "wordrun.model.images:ConvNet")
register("model", "resnet", "wordrun.config_images:ResNetConfig", "wordrun.model.images:ResNet")

register("tokenizer", "char", "wordrun.config:CharTokenizerConfig", "wordrun.data.tokenizers.char:CharTokenizer")
register("tokenizer", "byte", "wordrun.config:ByteTokenizerConfig", "wordrun.data.tokenizers.char:ByteTokenizer")
register("tokenizer", "gpt2", "wordrun.config:GPT2TokenizerConfig", "wordrun.data.tokenizers.subword:GPT2Tokenizer")
register("tokenizer", "bpe", "wordrun.config:BPETokenizerConfig", "wordrun.data.tokenizers.subword:BPETokenizer")
register("tokenizer", "hf", "wordrun.config:HFTokenizerConfig", "wordrun.data.tokenizers.subword:HFTokenizer")

register("data", "file", "wordrun.config:TextConfig", "wordrun.prepare.sources.files:FileSource")
register("data", "download", "wordrun.config:TextConfig", "wordrun.prepare.sources.download:DownloadSource")
register("data", "sample", "wordrun.config:TextConfig", "wordrun.prepare.sources.sample:SampleSource")
register("data", "hf", "wordrun.config:TextConfig", "wordrun.prepare.sources.hub:HubSource")
register("data", "shards", "wordrun.config:TextConfig", "wordrun.prepare.sources.shards:ShardSource")
register("data", "pairs", "wordrun.config:TextConfig", "wordrun.prepare.sources.pairs:PairSource")
register("data", "digits", "wordrun.config_images:ImagesConfig", "wordrun.data.images:digits")
register("data", "mnist", "wordrun.config_images:ImagesConfig", "wordrun.prepare.vision:mnist")
register("data", "cifar10", "wordrun.config_images:ImagesConfig", "wordrun.prepare.vision:cifar10")
register("data", "imagefolder", "wordrun.config_images:ImageFolderConfig", "wordrun.data.images:imagefolder")
register("data", "fake_images", "wordrun.config_images:FakeImagesConfig", "wordrun.data.images:fake_images")

register("backend", "DDP", "wordrun.config:DDPConfig", "wordrun.backend.ddp:DDPBackend")
register("backend", "FSDP", "wordrun.config:FSDPConfig", "wordrun.backend.fsdp:FSDPBackend")
register("backend", "TP", "wordrun.config:TPConfig", "wordrun.backend.fsdp:FSDPBackend")
register("backend", "PP", "wordrun.config:PPConfig", "wordrun.backend.pipeline:PipelineBackend")
register("backend", "3D", "wordrun.config:ThreeDConfig", "wordrun.backend.pipeline:PipelineBackend")
register("backend", "deepspeed", "wordrun.config:DeepSpeedConfig", "wordrun.backend.deepspeed:DeepSpeedBackend")
register("backend", "diloco", "wordrun.config:DilocoConfig", "wordrun.backend.diloco:diloco")

register("optimizer", "adamw", "wordrun.config:AdamWConfig", "wordrun.train.optim:adamw")
register("optimizer", "muon", "wordrun.config:MuonConfig", "wordrun.train.muon:Muon")
register("optimizer", "sgd", "wordrun.config:SGDConfig", "wordrun.train.optim:sgd")
register("optimizer", "lion", "wordrun.config:LionConfig", "wordrun.train.optim:Lion")

register("schedule", "cosine", "wordrun.config:ScheduleConfig", "wordrun.train.schedule:cosine")
register("schedule", "linear", "wordrun.config:LinearScheduleConfig", "wordrun.train.schedule:linear")
register("schedule", "constant", "wordrun.config:ScheduleConfig", "wordrun.train.schedule:constant")

register("tracker", "jsonl", "wordrun.config:TrackerConfig", "wordrun.track.jsonl:JsonlTracker")
register("tracker", "wandb", "wordrun.config:WandbConfig", "wordrun.track.wandb:WandbTracker")
register("tracker", "tensorboard", "wordrun.config:TensorBoardConfig", "wordrun.track.tensorboard:TensorBoardTracker")
register("tracker", "mlflow", "wordrun.config:MlflowConfig", "wordrun.track.mlflow:MlflowTracker")
register("tracker", "trackio", "wordrun.config:TrackioConfig", "wordrun.track.trackio:TrackioTracker")

register("profiler", "none", "wordrun.config:ProfilerConfig", "wordrun.train.profile:Profiler")
register("profiler", "pyinstrument", "wordrun.config:PyinstrumentConfig", "wordrun.train.profile:PyinstrumentProfiler")
register("profiler", "torch", "wordrun.config:TorchProfilerConfig", "wordrun.train.profile:TorchProfiler")
register("profiler", "spans", "wordrun.config:SpansProfilerConfig", "wordrun.train.profile:SpansProfiler")
register("profiler", "memory", "wordrun.config:MemoryProfilerConfig", "wordrun.train.profile:MemoryProfiler")

register("metrics", "accuracy", "wordrun.config:AccuracyConfig", "wordrun.train.measures:accuracy")
register("metrics", "top5", "wordrun.config:TopKConfig", "wordrun.train.measures:top_k")

register("hooks", "early_stop", "wordrun.config:EarlyStopConfig", "wordrun.train.hooks.early_stop:EarlyStop")
register("hooks", "ema", "wordrun.config:EMAConfig", "wordrun.train.hooks.ema:EMA")
register("hooks", "statistics", "wordrun.config:StatisticsConfig", "wordrun.train.hooks.statistics:statistics")
register("hooks", "coordinates", "wordrun.config:CoordinatesConfig", "wordrun.train.hooks.coordinates:Coordinates")
register("hooks", "spikes", "wordrun.config:SpikesConfig", "wordrun.train.hooks.spikes:Spikes")
register("hooks", "lr_range", "wordrun.config:LRRangeConfig", "wordrun.train.hooks.lr_range:LRRange")
