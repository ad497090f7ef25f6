"""Options of train.backend=deepspeed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from wordrun.backend.deepspeed import settings
from wordrun.backend.options import BackendConfig
from wordrun.common.errors import ConfigError
from wordrun.common.validation import not_negative, positive
from wordrun.dist.mesh import Layout


@dataclass
class DeepSpeedConfig(BackendConfig):
    """DeepSpeed's engine: data parallel, with the training state sharded across ranks (ZeRO stages 0 to 3)."""

    engine: ClassVar[str] = "DeepSpeed"
    keeps_parameters: ClassVar[bool] = False
    completes_steps: ClassVar[bool] = False
    pads_vocabulary: ClassVar[bool] = False
    always_shown: ClassVar[tuple[str, ...]] = ("stage",)
    estimates: ClassVar[str] = "wordrun.backend.deepspeed.estimates"

    name: str = "deepspeed"
    """Name of the backend; set by train.backend."""
    stage: int = 1
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory and run the optimizer on the CPU; stages 1 to 3."""
    offload_params: bool = False
    """Keep parameter shards in host memory; stage 3."""
    bucket_elements: int | None = None
    """Bucket size for gradients and parameters, in elements; null: DeepSpeed's default, 500 million."""
    keep_below: int | None = None
    """At stage 3, do not shard parameters with fewer elements than this; null: DeepSpeed's default, 100,000."""
    overlap_comm: bool | None = None
    """Overlap gradient reduction with the backward pass; null: DeepSpeed's default for the stage."""
    config: str | None = None
    """A ds_config file (JSON) with further settings; a file that contradicts the run's options is rejected."""

    @property
    def fixed_accumulation(self) -> bool:
        return True

    @property
    def chunked_loss(self) -> bool:
        """Stage 3 gathers the weights of the output layer only while that layer runs."""
        return self.stage < 3

    @property
    def sharded_states(self) -> tuple[str, ...]:
        return ("optimizer", "gradients", "parameters")[: self.stage]

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer or self.offload_params

    def unavailable(self) -> str:
        if importlib.util.find_spec("deepspeed") is None:
            return "train.backend=deepspeed needs DeepSpeed, which is not installed: pip install 'wordrun[deepspeed]'"
        return ""

    def problems(self) -> Iterable[str]:
        yield from positive("backend", self, "bucket_elements")
        yield from not_negative("backend", self, "keep_below")
        if self.bucket_elements and self.bucket_elements % 2:
            use = self.bucket_elements + 1
            yield f"backend.bucket_elements={self.bucket_elements} should be even, as DeepSpeed requires: use {use}"
        if not 0 <= self.stage <= 3:
            yield f"backend.stage={self.stage} should be 0, 1, 2 or 3"
        if self.offload_optimizer and self.stage == 0:
            yield "backend.offload_optimizer=true needs sharded optimizer state: backend.stage=1 to 3"
        if self.offload_params and self.stage != 3:
            yield f"backend.offload_params=true needs sharded parameters: use backend.stage=3, not {self.stage}"

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if cfg.lora_rank:
            yield (
                f"model.lora_rank={cfg.lora_rank} does not work with DeepSpeed, whose checkpoints hold all "
                "weights: use train.backend=FSDP or DDP"
            )
        if cfg.train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip does not work with DeepSpeed, whose engine takes every step: "
                "use train.on_nonfinite=rollback"
            )
        if cfg.train.chunked_loss and not self.chunked_loss:
            yield (
                "train.chunked_loss=true: with backend.stage=3, DeepSpeed gathers the output layer's weights only "
                "while the layer runs: omit it, or use another backend.stage or train.backend=FSDP"
            )
        if cfg.train.compile is True and self.stage == 3:
            yield (
                "train.compile=true: compiled blocks cannot wait for the parameters that backend.stage=3 gathers: "
                "use train.compile=false, backend.stage=2, or train.backend=FSDP"
            )

    def conflicts_on(self, cfg: Any, at: Layout | None, gas: int | None) -> Iterable[str]:
        """Return where the run's options contradict DeepSpeed's checkpoints and its config file."""
        if cfg.train.memory_checkpoint_interval:
            yield (
                "train.memory_checkpoint_interval needs wordrun's own checkpoints, and train.backend=deepspeed writes "
                "DeepSpeed's: set it to 0, or use train.backend=FSDP"
            )
        try:
            settings.merge(cfg, self, cfg.train.dtype, at.size if at else None, gas)
        except ConfigError as error:
            yield from str(error).splitlines()

    @classmethod
    def strategies(cls) -> dict[str, BackendConfig]:
        """Return the ZeRO stages, with and without offloading."""
        return {
            **{f"DeepSpeed ZeRO-{stage}": cls(stage=stage) for stage in (1, 2, 3)},
            "DeepSpeed ZeRO-2, offload": cls(stage=2, offload_optimizer=True),
            "DeepSpeed ZeRO-3, offload": cls(stage=3, offload_optimizer=True, offload_params=True),
        }
