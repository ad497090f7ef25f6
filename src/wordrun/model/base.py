"""The interface of models that backends use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from wordrun.common.errors import UserError

DRAWN_ON_CPU = 2**25
"""Matrices of up to this many elements are drawn on the CPU, so that they are the same on every kind of device.

Larger ones are drawn on their own device: the CPU would take seconds for each.
"""


class LazyWeights(Mapping[str, Tensor]):
    """Weights by name. Each is read when it is accessed, by its function in ``readers``."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        """Read one weight."""
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class LossesOf:
    """The losses of a batch, as an argument for wrappers that can only call a model, such as DistributedDataParallel.

    A model that is called with it computes the losses, for which it calls itself with the tensors: so below such a
    wrapper, ``Model.__call__`` is entered twice. A module around the model would avoid that, but all parameters in
    DeepSpeed's checkpoints would have other names.
    """

    batch: Any
    outputs: list[Tensor] | None = None
    """Where to append the outputs from which metrics are computed; None: they are not needed."""

    def computed_by(self, model: Model) -> Tensor:
        """Return the loss of each example, (B,), in one forward pass of ``model``."""
        if self.outputs is None:
            return model.losses(self.batch)
        losses, outputs = model.losses_and_outputs(self.batch)
        self.outputs.append(outputs)
        return losses


@dataclass(frozen=True)
class Rows:
    """How the rows of a hidden matrix divide into matrices: by head, and within each head by kind, such as q, k, v."""

    heads: int = 1
    kinds: int = 1
    apart: bool = False
    """Whether each kind is always a separate matrix, whatever the optimizer's options say, as for experts."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint from which ``wordrun.load`` has made a model."""

    checkpoint: str
    """Its step and its checksum."""
    weights: Mapping[str, Tensor]
    """Its weights, each read when it is accessed."""


class Model(nn.Module):
    """Base class of models: an ``nn.Module`` that computes its losses and initializes itself, module by module.

    Backends build it on the meta device, where tensors have shapes but no memory. A module that registers buffers must
    fill them in ``reset_parameters``, as torch's own modules do.
    """

    blocks: nn.ModuleDict
    """The modules that are sharded, recomputed and compiled one by one, unless ``blocks_at`` or ``named_blocks`` names
    others; a model without them is sharded as a whole."""
    blocks_at = "blocks"
    """The name in the model of the module whose children are the blocks, such as ``model.layers``."""
    loaded_from: Loaded | None = None
    """Where ``wordrun.load`` has found this model; None: it has another origin."""
    uses: tuple[str, ...] = ("tokens", "targets")
    """Fields of a batch of text that ``losses`` reads. Data that set another field, such as ``scale``, are rejected."""
    averages_buffers = True
    """Whether floating-point buffers in checkpoints depend on each rank's data, so that they are averaged per step."""
    compiled_loss = False
    """Whether to compute the loss by a compiled function, if the model has one."""
    computes_losses_in_fp32 = False
    """Whether ``losses`` computes them in fp32 from outputs of any dtype, so that it needs no autocast."""
    chunked_loss: bool | None = None
    """Whether to turn logits into their gradients chunk by chunk, if the model can; None: if there are many."""
    unpadded_rows: Mapping[str, int] = MappingProxyType({})
    """Rows without padding, by name, of parameters that end in padding: rows of zeros, which checkpoints omit."""
    has_huggingface_format = False
    """Whether the model defines ``read_huggingface`` and ``write_huggingface``."""
    _seen: list[Any] | None = None
    """Where ``losses_and_outputs`` collects the results of forward passes; None: nowhere. A hook could not do it: torch
    ignores those that are registered after a module was compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass. For a wrapper that passes on ``LossesOf`` a batch, return its losses, (B,)."""
        if args and isinstance(args[0], LossesOf):
            return args[0].computed_by(self)
        outputs = super().__call__(*args, **kwargs)
        if self._seen is not None:
            self._seen.append(outputs)
        return outputs

    def compile_loss(self, *, on: bool = True) -> None:
        """Compute the loss by a compiled function from now on, or stop doing so."""
        self.compiled_loss = on

    def choose_loss(self, *, chunked: bool | None) -> None:
        """Turn logits into their gradients chunk by chunk, or not; None: if there are many."""
        self.chunked_loss = chunked

    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each example of ``batch``, (B,), which is on the model's device.

        It should call the model, ``self(...)``, rather than the method ``forward``: module hooks gather parameters and
        compile.
        """
        raise NotImplementedError

    def metrics(self, batch: Any, outputs: Tensor) -> dict[str, Tensor]:
        """Return what an evaluation reports besides the loss, by name: a value for each example of ``batch``, (B,).

        Args:
            batch: as for ``losses``.
            outputs: what ``forward`` returned when ``losses`` called it.
        """
        return {}

    def complete_step(self, add_up: Callable[[Tensor], None]) -> None:
        """Use what the passes of a step have counted, such as tokens per expert; called once, after the last pass.

        Args:
            add_up: adds up a tensor over all ranks with the same parts of the model, in place.
        """

    def loads(self) -> Tensor | None:
        """Return the load of each expert in the last step relative to the mean of its block, (blocks, experts), 0 for
        the blocks of other pipeline stages; None: there are no experts."""
        return None

    def logits_at(self, tokens: Tensor, at: int, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the logits (B, V) at position ``at`` of ``tokens`` (B, T), for models of text.

        Args:
            tokens: token ids.
            at: the position whose next token is predicted.
            forward: what to call instead of the model, such as an engine around it.
        """
        return (forward or self)(tokens)[:, at]

    def losses_and_outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the losses of ``batch``, (B,), and the outputs from which its metrics are computed.

        Raises:
            UserError: ``losses`` does not call the model, so that there are no outputs.
        """
        seen: list[Tensor] = []
        self._seen = seen
        try:
            losses = self.losses(batch)
        finally:
            self._seen = None
        if not seen:
            name = type(self).__name__
            raise UserError(f"{name}.losses should call self(...), whose result is what metrics are computed from")
        return losses, seen[-1]

    def tie(self) -> None:
        """Tie shared parameters again; allocating memory has made copies of them. See also ``tie_all``."""

    def tie_all(self) -> None:
        """Do the same in ``inner_models``, too."""
        for model in self.inner_models().values():
            model.tie_all()
        self.tie()

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how tensor-parallel ranks shard the matrices, as torch's parallel styles by module name."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of the matrix ``name``."""
        return 0.02

    def matrices(self) -> dict[str, Rows]:
        """Return the hidden matrices, by the names of the parameters, for optimizers that treat them as such.

        They map features to features: not embeddings, and neither the first layer nor the output layer. By
        default, they are those of the blocks or, if it has none, all but the first and the last.
        """
        tables = {id(each.weight) for each in self.modules() if isinstance(each, nn.Embedding)}
        found = {name: p for name, p in self.named_parameters() if p.dim() >= 2 and id(p) not in tables}
        if self.named_blocks():
            names = [*filter(self.block_of, found)]
        else:
            inner = tuple(self.inner_models())
            names = [name for name in found if not name.startswith(inner)][1:-1]
        return dict.fromkeys(names, Rows())

    def named_blocks(self) -> dict[str, nn.Module]:
        """Return the modules that are sharded, recomputed and compiled one by one, by their names in the model.

        By default, they are the children of the module ``blocks_at``. A block must not contain another one.
        """
        at = self.blocks_at
        return {f"{at}.{name}": block for name, block in self.get_submodule(at).named_children()}

    def use_blocks_at(self, name: str) -> None:
        """Let the children of the module of this ``name`` be the blocks."""
        self.blocks_at = name

    def note_source(self, source: Loaded) -> None:
        """Note where ``wordrun.load`` has found this model."""
        self.loaded_from = source

    def block_of(self, name: str) -> str:
        """Return the name of the block to which the parameter or module ``name`` belongs; empty: to none."""
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        blocks = self.named_blocks()
        return next((path for path in paths if path in blocks), "")

    def outside_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the modules outside of the blocks, by the prefix of their parameters' names; the last is the model.

        They are meant without their submodules, which are in the list themselves, or are blocks or ``inner_models``.
        """
        inner = tuple(self.inner_models())
        outside = [(f"{name}." if name else "", module) for name, module in self.named_modules()]
        return [each for each in reversed(outside) if not (each[0].startswith(inner) or self.block_of(each[0][:-1]))]

    def inner_models(self) -> dict[str, Model]:
        """Return the models that this one contains, such as a teacher, by the prefix of their parameters' names.

        They have blocks of their own. Those inside of these are left out.
        """
        found: dict[str, Model] = {}
        for name, module in self.named_modules():
            if isinstance(module, Model) and module is not self and not name.startswith(tuple(found)):
                found[f"{name}."] = module
        return found

    def frozen_models(self) -> dict[str, Model]:
        """Return those of the inner models that ``wordrun.load`` has filled and that are not trained.

        Checkpoints leave them out: the run from which they are has their weights.
        """
        return {
            prefix: model
            for prefix, model in self.inner_models().items()
            if model.loaded_from and not any(p.requires_grad for p in model.parameters())
        }

    def loaded_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the inner models that ``wordrun.load`` fills, by name, each read on access."""
        return LazyWeights(
            {
                prefix + name: partial(model.loaded_from.weights.__getitem__, name)
                for prefix, model in self.inner_models().items()
                if model.loaded_from
                for name in model.loaded_from.weights
            }
        )

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, but leave ``frozen_models`` in evaluation mode."""
        super().train(mode)
        for model in self.frozen_models().values():
            nn.Module.train(model, False)
        return self

    @classmethod
    def settle_options(cls, cfg: Any) -> Any:
        """Return the model's options with what files decide, before a run is built; one rank calls this.

        Checkpoints contain them, so that the model can be built without these files.

        Raises:
            UserError: a file is missing or unsuitable.
        """
        return cfg

    def own_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights with which a run without train.init_from starts, by name, each read when it is accessed.

        None: random ones, as for weights whose names are missing. The model is on the meta device.
        """
        return None

    def read_huggingface(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the weights in a folder of Hugging Face's format by this model's names, as ``own_weights`` does.

        Raises:
            UserError: the folder has weights of another model.
        """
        raise NotImplementedError

    def write_huggingface(self, folder: Path, limit: int) -> None:
        """Write the model, on the CPU, to ``folder`` in Hugging Face's format, in files of at most ``limit`` bytes."""
        raise NotImplementedError

    def stops(self) -> Sequence[int]:
        """Return the tokens that end a text, if it is in the tokenizer that the model came with."""
        return ()

    def continued(self, prompt: Tensor, length: int, **sampling: Any) -> Tensor | None:
        """Return ``prompt`` (B, T) followed by at most ``length`` generated tokens; None: by wordrun's own sampler.

        ``sampling`` are the options of ``wordrun.model.generate.generate``.
        """
        return None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint stores: parameters (shared ones once) and persistent buffers.

        Those of ``frozen_models`` are left out.
        """
        persistent, frozen = self.state_dict().keys(), tuple(self.frozen_models())
        buffers = ((name, buffer) for name, buffer in self.named_buffers() if name in persistent)
        yield from (each for each in (*self.named_parameters(), *buffers) if not each[0].startswith(frozen))

    def num_active_parameters(self) -> int:
        """Return the number of parameters that each example uses."""
        return self.num_parameters()

    def num_parameters(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def initialize(self, seed: int, module: nn.Module | None = None, prefix: str = "", *, recurse: bool = True) -> None:
        """Initialize matrices from a normal distribution, biases and padding to 0, other parameters to 1, and buffers
        by module.

        Each matrix has its own random generator, seeded with ``seed`` and its name, so that a rank can initialize its
        part of the model without the rest.

        Args:
            seed: random seed of the weights.
            module: initialize this module of the model only.
            prefix: prefix of its parameters' names in the full model.
            recurse: include its submodules.
        """
        module = self if module is None else module  # not ``or``: an empty ModuleList is falsy
        for each in module.modules() if recurse else [module]:
            _reset(each)
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), recurse=recurse):
            if parameter.dim() >= 2:
                rows = self.unpadded_rows.get(name, len(parameter))
                drawn = parameter[:rows]
                drawn.copy_(self._draw(seed, name, drawn))
                parameter[rows:].zero_()
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def _draw(self, seed: int, name: str, parameter: Tensor) -> Tensor:
        """Return the initial values of ``parameter``, drawn with ``seed`` and ``name``."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        device = torch.device("cpu") if parameter.numel() <= DRAWN_ON_CPU else parameter.device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
        values = parameter if parameter.device == device else torch.empty_like(parameter, device=device)
        return values.normal_(std=self.initial_std(name), generator=generator)

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:
        """Fill the buffers that checkpoints do not store, in modules with buffers still on the meta device."""
        for module in self.modules():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
                module.to_empty(device=device, recurse=False)
                _reset(module)
                module.load_state_dict(kept)


def _reset(module: nn.Module) -> None:
    """Fill the module's own buffers, if it has any."""
    names = ", ".join(name for name, _ in module.named_buffers(recurse=False))
    if names and not hasattr(module, "reset_parameters"):
        raise NotImplementedError(
            f"{type(module).__name__} has buffers ({names}) and no method reset_parameters to fill them: models are "
            "built on the meta device, where values set in a constructor are lost"
        )
    if names:
        module.reset_parameters()  # type: ignore[operator]
