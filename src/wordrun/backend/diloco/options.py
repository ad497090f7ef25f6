"""Options of train.backend=diloco."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from wordrun.backend.options import BackendConfig, DDPConfig, FSDPConfig
from wordrun.common.errors import ConfigError
from wordrun.common.section import field_types, fits, value_text
from wordrun.common.suggestions import nearest
from wordrun.common.validation import above_zero, fractions, positive
from wordrun.dist.mesh import Layout, resolve
from wordrun.train.options import DTYPES


@dataclass
class DilocoConfig(BackendConfig):
    """DiLoCo, for slow links: islands of ranks train independently and exchange weights every backend.sync_every
    steps."""

    synchronous: ClassVar[bool] = False
    estimates: ClassVar[str] = "wordrun.backend.diloco.estimates"

    name: str = "diloco"
    """Name of the backend; set by train.backend."""
    inner: str = "DDP"
    """The backend within each island: DDP or FSDP."""
    inner_options: dict[str, Any] = field(default_factory=dict)
    """Options of the inner backend, such as {reshard_after_forward: false}; see backend.KEY of DDP and FSDP."""
    islands: int | None = None
    """Number of islands, each of consecutive ranks; null: one per node or, on a single node, one per rank."""
    sync_every: int = 30
    """Steps between two exchanges of the same weights."""
    outer_lr: float = 0.7
    """Learning rate of the outer steps, in which the islands' mean change of the weights is the gradient."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer steps; 0: none."""
    fragments: int = 1
    """Split the weights into this many fragments of whole blocks, exchanged at different steps (streaming DiLoCo)."""

    @property
    def one_module(self) -> bool:
        """Whether nothing runs between the blocks, as with DDP within the islands."""
        return self.inner.upper() == "DDP"

    @property
    def sharded_states(self) -> tuple[str, ...]:
        return self.inside().sharded_states

    @property
    def offloads(self) -> bool:
        return self.inside().offloads

    def problems(self) -> Iterable[str]:
        yield from positive("backend", self, "islands", "sync_every", "fragments")
        yield from above_zero("backend", self, "outer_lr")
        yield from fractions("backend", self, "outer_momentum")
        if self.fragments > self.sync_every:
            yield (
                f"backend.fragments={self.fragments} are exchanged at different steps, and backend.sync_every="
                f"{self.sync_every} has fewer: use at most {self.sync_every}"
            )
        try:
            inside = self.inside()
        except ConfigError as error:
            yield str(error)
            return
        yield from (self.of_inner(problem) for problem in inside.problems())
        wanted = {**inside.axes(), "ep": inside.experts_over}
        divided = [f"{axis}: {value_text(wanted[axis])}" for axis in ("tp", "cp", "ep") if wanted.get(axis, 1) != 1]
        if divided:
            yield (
                f"backend.inner_options={{{', '.join(divided)}}}: the islands of "
                "train.backend=diloco have no tensor, context or expert parallelism: use replicate and shard only"
            )

    def conflicts(self, cfg: Any) -> Iterable[str]:
        if cfg.train.on_nonfinite == "skip":
            yield (
                "train.on_nonfinite=skip needs all ranks to agree on each step, and the islands of "
                "train.backend=diloco take steps independently: use train.on_nonfinite=rollback"
            )
        if DTYPES.get(cfg.train.dtype) == "fp16":
            yield "train.dtype=fp16 would scale losses differently on each island: use train.dtype=bf16 or fp32"

    def layout(self, ranks: int, per_node: int) -> Layout:
        """Return the layout of ``ranks`` ranks; islands are the outermost part of its axis ``replicate``."""
        islands = self.count(ranks, per_node)
        each, inside = ranks // islands, self.inside()
        if each == 1 and inside.sharded:
            raise ConfigError(
                f"backend.inner=FSDP shards the model across the ranks of an island, and each of the {islands} islands "
                "has only one: use a smaller backend.islands, or backend.inner=DDP"
            )
        try:
            at = resolve(each, min(each, per_node), inside.axes())
        except ConfigError as error:
            raise ConfigError(f"inside each island of {each} ranks: {self.of_inner(str(error))}") from None
        return replace(at, replicate=at.replicate * islands, islands=islands)

    def conflicts_on(self, cfg: Any, at: Layout | None, gas: int | None) -> Iterable[str]:
        """Return where the options of ``cfg`` contradict those of the islands' backend."""
        if at is None:
            return
        inside = self.inside()
        if inside.one_micro_step and gas != 1:
            yield "backend.inner_options.static_graph=true needs one micro-step per step: omit it or train.accumulation"
        yield from map(self.of_inner, inside.conflicts_on(cfg, at.of_island, gas))

    def inside(self) -> BackendConfig:
        """Return the options of the inner backend.

        Raises:
            ConfigError: it is neither DDP nor FSDP, or does not have the options.
        """
        kinds: dict[str, type[BackendConfig]] = {"DDP": DDPConfig, "FSDP": FSDPConfig}
        kind = kinds.get(self.inner.upper())
        if kind is None:
            raise ConfigError(
                f"backend.inner={self.inner}: islands train with DDP or FSDP: use backend.inner=DDP, or FSDP if the "
                "model does not fit on one device"
            )
        types = field_types(kind)  # type: ignore[arg-type]
        for name, value in self.inner_options.items():
            if name not in types or name == "name":
                raise ConfigError(
                    f"backend.inner_options.{name}: {kind().name} has no such option{nearest(name, types)}"
                )
            if not fits(value, types[name]):
                expected = getattr(types[name], "__name__", types[name])
                raise ConfigError(f"backend.inner_options.{name}={value} should be of type {expected}")
        return kind(**self.inner_options)

    def of_inner(self, problem: str) -> str:
        """Return a message about the inner backend's options, with their names in the options of DiLoCo."""
        return problem.replace("backend.", "backend.inner_options.")

    def count(self, ranks: int, per_node: int) -> int:
        """Return the number of islands of ``ranks`` ranks, ``per_node`` to a node.

        Raises:
            ConfigError: they do not divide the ranks.
        """
        wanted = self.islands or (ranks if per_node >= ranks else max(1, ranks // per_node))
        if ranks % wanted:
            fits = sorted((n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: abs(n - wanted))[:2]
            raise ConfigError(
                f"backend.islands={wanted} does not divide {ranks} ranks: use {' or '.join(map(str, sorted(fits)))}"
            )
        return wanted
