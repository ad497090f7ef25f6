"""``model=hf``: any causal language model of the transformers library, built and initialized by the library itself."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wordrun.common.errors import ConfigError, UserError, first_line
from wordrun.dist.collectives import all_mean
from wordrun.model.base import LazyWeights
from wordrun.model.huggingface_files import fetch, has_weights, open_files, read_config
from wordrun.model.options import HFConfig
from wordrun.model.output_layer import cross_entropy
from wordrun.model.plain_module import PlainModel

OLDEST = 5
"""The first major version of transformers whose models initialize their buffers, and convert weights on their own."""
NET = "net."
"""Prefix of the names of the library's parameters."""


class HFModel(PlainModel):
    """A causal language model of transformers.

    Args:
        cfg: the model's options, with the complete content of config.json (``settle_options``).
        vocab_size: size of the data's vocabulary, which the model's may exceed.

    Raises:
        ConfigError: the library has no such model, or its vocabulary is too small.
    """

    uses: tuple[str, ...] = ("tokens", "targets", "scale")
    computes_losses_in_fp32 = True
    has_huggingface_format = True

    def __init__(self, cfg: HFConfig, vocab_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        config = library_config(cfg)
        rows = config.get_text_config().vocab_size
        if rows < vocab_size:
            raise ConfigError(
                f"model.path={cfg.path} has a vocabulary of {rows} tokens, and the data's has {vocab_size}: use the "
                "model's own tokenizer (tokenizer=hf tokenizer.path=FOLDER), or train a new model of this size with "
                f"model.pretrained=false +model.config.vocab_size={vocab_size}"
            )
        longest = getattr(config, "max_position_embeddings", None) or cfg.block_size
        if cfg.block_size > longest:
            raise ConfigError(
                f"model.block_size={cfg.block_size} is more than the {longest} tokens that the model in "
                f"model.path={cfg.path} supports (max_position_embeddings): use model.block_size={longest}"
            )
        self.net = _library().AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=cfg.trust_remote_code
        )
        if not self.net._is_stateful and "position_ids" in inspect.signature(self.net.forward).parameters:
            self.uses = (*HFModel.uses, "documents")
        self.balance = 0.0
        """Coefficient of the loss that balances experts; 0: there is none."""
        if getattr(config, "output_router_logits", False):
            self.balance = float(config.router_aux_loss_coef)
        self._routed: Sequence[Tensor] = ()
        self._passes, self._keeps_apart = 0, False
        self.blocks = nn.ModuleDict()
        self._block_names = _blocks(self.net)
        self._blocks: dict[str, nn.Module] = {}
        self._first: dict[str, Tensor] = {}
        """Initial values outside of the blocks, while they are copied."""
        self.remember(partial(HFModel, cfg, vocab_size))

    @classmethod
    def settle_options(cls, cfg: HFConfig) -> HFConfig:
        """Return ``cfg`` with the content of the folder's config.json and generation_config.json.

        Raises:
            UserError: the folder has no causal language model that this version of transformers knows.
        """
        folder = fetch(str(cfg.path), "model.path=", ("config.json", "generation_config.json", "tokenizer*"))
        facts = {**read_config(folder), **cfg.config}
        file = folder / "generation_config.json"
        generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        settled = replace(cfg, path=str(folder), config=facts, generation={**generation, **cfg.generation})
        library_config(settled)
        return settled

    def named_blocks(self) -> dict[str, nn.Module]:
        """Return the modules that the library's model does not want to be split."""
        if not self._blocks:
            self._blocks = {name: self.get_submodule(name) for name in self._block_names}
        return self._blocks

    def matrices(self) -> dict[str, Any]:
        """Return the hidden matrices: two-dimensional parameters of the blocks."""
        shapes = {name: p.dim() for name, p in self.named_parameters()}
        return {name: rows for name, rows in super().matrices().items() if shapes[name] == 2}

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) for ``tokens`` (B, T).

        Args:
            tokens: token ids.
            documents: the document number of each token, (B, T), if documents must not affect each other.
        """
        more = {}
        if documents is not None:  # the library separates documents where positions restart
            at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            more["position_ids"] = at - torch.where(starts, at, 0).cummax(1).values
        found = self.net(input_ids=tokens, use_cache=False, **more)
        self._routed = found.router_logits if self.balance and self.training else ()
        return found.logits  # type: ignore[no-any-return]

    def losses(self, batch: Any) -> Tensor:
        """Return the mean cross entropy of each sequence of ``batch`` in nats per token, (B,)."""
        given = {}
        if batch.documents is not None:
            given["documents"] = batch.documents
            self._check_documents(batch.tokens)
        losses = cross_entropy(self(batch.tokens, **given), batch.targets)
        losses = losses if batch.scale is None else losses * batch.scale
        return losses + self._balancing() if self._routed and torch.is_grad_enabled() else losses

    @torch.no_grad()
    def _check_documents(self, tokens: Tensor) -> None:
        """Before the first batch of documents, check that the first half of ``tokens`` does not affect the second.

        Raises:
            ConfigError: the library's model ignores where positions restart.
        """
        if self._keeps_apart:
            return
        training, half = self.training, tokens.shape[1] // 2
        documents = (torch.arange(tokens.shape[1], device=tokens.device) >= half).long().expand_as(tokens)
        others = torch.cat([tokens[:, :half].roll(1, 1).flip(0), tokens[:, half:]], 1)
        self.eval()
        first, second = (self(each, documents=documents)[:, half:].float() for each in (tokens, others))
        self.train(training)
        self._keeps_apart = bool((first - second).abs().max() <= 1e-3 * first.abs().max())
        if not self._keeps_apart:
            raise ConfigError(
                f"model.path={self.cfg.path}: this model of transformers does not separate the documents of a "
                "sequence: use data.mask_documents=false"
            )

    def _balancing(self) -> Tensor:
        """Return the loss that balances the experts, as the library computes it in one process.

        It is a product of two means over the batch, of the chosen experts and of the chances, so that the first is
        taken over all ranks.
        """
        self._passes += 1
        if self._passes > 1:
            raise ConfigError(
                f"model.path={self.cfg.path}: with output_router_logits=true in config.json, experts are balanced over "
                "the complete batch, so that a step must be one micro-step: use train.accumulation=1 with a larger "
                "model.batch_size, or +model.config.output_router_logits=false"
            )
        logits, self._routed = torch.cat([each.flatten(0, -2) for each in self._routed]), ()
        chances, experts = logits.softmax(-1).float(), logits.shape[-1]
        chosen = chances.detach().topk(self.net.config.num_experts_per_tok).indices
        shares = all_mean(F.one_hot(chosen, experts).sum(1).float().mean(0))
        return self.balance * experts * (shares * chances.mean(0)).sum()

    def complete_step(self, add_up: Callable[[Tensor], None]) -> None:
        """Begin a new step."""
        self._passes = 0

    # Initial values: the library's own, drawn for each block (and for the rest) from a generator of its own, so that
    # every layout draws the same ones, and no rank holds more than a block and its shards.

    @torch.no_grad()
    def initialize(self, seed: int, module: nn.Module | None = None, prefix: str = "", *, recurse: bool = True) -> None:
        """Copy the values that the library draws for ``module``; see ``Model.initialize``."""
        if module is None:
            for name, block in self.named_blocks().items():
                self.initialize(seed, block, f"{name}.")
            for name, each in self.outside_blocks():
                self.initialize(seed, each, name, recurse=False)
            return
        prefix = prefix.rstrip(".")
        if unit := self.block_of(prefix):
            values = self._drawn(seed, unit)
        else:
            values = self._first = self._first or self._drawn(seed, "")
        for tensors in (module.named_parameters, module.named_buffers):
            for name, tensor in tensors(prefix, recurse, remove_duplicate=False):
                tensor.copy_(values[name])
        if module is self:  # backends initialize the submodules first
            self._first = {}

    def _drawn(self, seed: int, block: str) -> dict[str, Tensor]:
        """Return the initial values of the tensors in the ``block`` of this name; empty: of those outside the blocks.

        They are drawn in another such model, which is on the meta device but for them.
        """
        with torch.device("meta"):
            twin: Any = self._construct()
        if block:
            names = {name for name, _ in twin.get_submodule(block).named_modules(prefix=block)}
        else:
            names = {prefix.rstrip(".") for prefix, _ in self.outside_blocks()}
        for name in names:
            twin.get_submodule(name).to_empty(device="cpu", recurse=False)
        twin.tie()
        parameters = twin.named_parameters(remove_duplicate=False)
        buffers = twin.named_buffers(remove_duplicate=False)
        values = {name: tensor for name, tensor in [*parameters, *buffers] if not tensor.is_meta}
        for tensor in values.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        digest = hashlib.sha256(f"{seed} {block}".encode()).digest()
        with torch.random.fork_rng([]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            _initialize(twin.net, {*names, *_owners(names)})
        if missing := [name for name, each in values.items() if each.isnan().any()]:  # set by a constructor
            made = dict(self._constructed(seed).state_dict(keep_vars=True))
            made |= dict(self._constructed(seed).named_buffers())
            for name in missing:
                values[name].copy_(made[name])
        return values

    @torch.no_grad()
    def fill_buffers(self, device: torch.device) -> None:
        """Fill the buffers that checkpoints do not store with the library's values."""
        missing = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        values: dict[str, Tensor] = {}
        for block in dict.fromkeys(map(self.block_of, missing)):
            values |= self._drawn(0, block)
        for name in missing:
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, values[name].to(device))

    # Weights in the library's format.

    def own_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights in the folder of ``model.path``, if it has any and model.pretrained is true."""
        folder = Path(str(self.cfg.path))
        if not self.cfg.pretrained or not has_weights(folder):
            return None
        return self.read_huggingface(folder)

    def read_huggingface(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the weights in ``folder``, converted one by one as the library does; see ``Model``."""
        files, shapes = open_files(folder)
        readers, problems = _readers(self.net, files, shapes)
        ours: dict[str, Callable[[], Tensor]] = {}
        absent = []
        for first, *others in self._names.values():
            names = [name.removeprefix(NET) for name in (first, *others)]
            found = next((readers[name] for name in names if name in readers), None)
            if found is None:
                absent.append(names[0])
            else:
                ours |= dict.fromkeys([first, *others], found)
        ours |= {NET + name: read for name, read in readers.items() if NET + name not in ours}
        if problems:
            raise UserError("\n".join(f"{folder}: {problem}" for problem in problems[:8]))
        if not readers or len(absent) > len(self._names) // 2:
            raise UserError(
                f"{folder} has weights of another model: it lacks {len(absent)} of {len(self._names)}, such as "
                f"{', '.join(absent[:3])}; use the folder's own config.json (model.path={folder})"
            )
        if absent:
            shown = f"{', '.join(absent[:3])}{', ...' * (len(absent) > 3)}"
            _warn(f"{folder} lacks {len(absent)} of {len(self._names)} weights, which start random: {shown}")
        return LazyWeights(ours)

    def write_huggingface(self, folder: Path, limit: int) -> None:
        """Write the model with the library's ``save_pretrained``; see ``Model``."""
        facts = {key: value for key, value in self.cfg.config.items() if _is_dropout(key)}
        self.net.config.update({**facts, "dtype": next(self.net.parameters()).dtype})
        self.net.save_pretrained(folder, max_shard_size=limit)
        if self.cfg.generation:
            _library().GenerationConfig(**self.cfg.generation).save_pretrained(folder)

    def continued(self, prompt: Tensor, length: int, **sampling: Any) -> Tensor | None:
        """Return what the library's ``generate`` makes of ``prompt``; see ``Model``."""
        config = self.net.config
        longest = getattr(config, "max_position_embeddings", None)
        if longest and prompt.shape[1] + length > longest:
            return None  # wordrun's own sampler drops the beginning
        stop = [*sampling["stop"]]
        show = sampling.get("on_tokens")
        options = _library().GenerationConfig(
            max_new_tokens=length,
            do_sample=True,
            temperature=sampling["temperature"],
            top_k=sampling["top_k"] or 0,
            top_p=sampling["top_p"],
            eos_token_id=stop or None,
            pad_token_id=stop[0] if stop else 0,
        )
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(sampling["seed"])
            given = prompt.to(self.net.device)
            found: Tensor = self.net.generate(
                given,
                attention_mask=torch.ones_like(given),
                generation_config=options,
                streamer=_Streamer(show) if show else None,
            )
        return found.to(prompt.device)

    def stops(self) -> Sequence[int]:
        """Return the tokens that end a text in generation_config.json, or else in config.json."""
        ends = self.cfg.generation.get("eos_token_id", self.cfg.config.get("eos_token_id"))
        return ends if isinstance(ends, list) else [] if ends is None else [ends]


class _Streamer:
    """Shows tokens as the library generates them, without the prompt."""

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        self.show, self.prompt = show, True

    def put(self, tokens: Tensor) -> None:
        """Show a column of tokens, (B,); the first call has the prompt."""
        if not self.prompt:
            self.show(tokens.view(-1))
        self.prompt = False

    def end(self) -> None:
        """Do nothing at the end of the text."""


def _library() -> Any:
    """Return the transformers library.

    Raises:
        UserError: it is missing, or too old.
    """
    remedy = "install it with: pip install 'wordrun[hf]'"
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"model=hf needs the transformers library ({first_line(error)}): {remedy}") from None
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise UserError(f"model=hf needs transformers {OLDEST} or later, not {transformers.__version__}: {remedy}")
    return transformers


def _warn(text: str) -> None:
    from wordrun.common.log import FIRST_RANK, LOGGER

    LOGGER.warning("%s", text, extra=FIRST_RANK)


def _is_dropout(key: str) -> bool:
    """Return whether ``key`` of a config.json is the probability of a dropout."""
    return key.endswith(("dropout", "_pdrop", "dropout_prob", "dropout_rate"))


def library_config(cfg: HFConfig) -> Any:
    """Return the library's config of the model that ``cfg`` describes, with model.dropout.

    Raises:
        ConfigError: transformers has no such causal language model, or the folder's code may not be run.
    """
    library, facts, where = _library(), deepcopy(cfg.config), f"model.path={cfg.path}"
    kind, code = facts.get("model_type"), facts.get("auto_map") or {}
    known = kind in library.models.auto.configuration_auto.CONFIG_MAPPING
    if code and not cfg.trust_remote_code:
        own = f", or +model.config.auto_map=null uses the model {kind} of transformers" if known else ""
        raise ConfigError(
            f"{where} has Python code ({', '.join(sorted(set(map(str, code.values()))))}), which is not run unless you "
            f"trust it: model.trust_remote_code=true runs it{own}"
        )
    if facts.get("quantization_config"):
        raise ConfigError(
            f"{where}: its config.json has quantization_config, but only weights that are not quantized can be "
            "trained: use the original model, or write one with model.dequantize().save_pretrained(DIR)"
        )
    facts |= {key: cfg.dropout for key, value in facts.items() if _is_dropout(key) and isinstance(value, float | int)}
    try:
        if code:
            config = library.AutoConfig.from_pretrained(cfg.path, trust_remote_code=True, **facts)
        elif known:
            with tempfile.TemporaryDirectory() as folder:  # the library reads only files as it should
                Path(folder, "config.json").write_text(json.dumps(facts), encoding="utf-8")
                config = library.AutoConfig.from_pretrained(folder)
        else:
            raise ConfigError(
                f"{where}: transformers {library.__version__} knows no model_type={kind}: install a newer version, or "
                "use a folder whose config.json names a model that it has"
            )
    except UserError:
        raise
    except Exception as error:  # the file may contain anything
        raise ConfigError(f"{where}: config.json is not valid for model_type={kind}: {first_line(error)}") from None
    causal = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    inner = sorted({*getattr(config, "sub_configs", {})} - {"text_config"})
    what = ""
    if getattr(config, "is_encoder_decoder", False):
        what = "maps one sequence to another (is_encoder_decoder)"
    elif inner and any(facts.get(name) for name in inner):
        what = f"is not for text alone ({', '.join(inner)})"
    elif not code and type(config) not in causal:
        what = "is not a causal language model of transformers"
    if what:
        raise ConfigError(
            f"{where}: a model of the type {kind} {what}, and model=hf trains causal language models of text: use a "
            "folder with one (AutoModelForCausalLM)"
        )
    for key in [key for key in config.to_dict() if _is_dropout(key)]:  # those that config.json leaves to their defaults
        if isinstance(getattr(config, key, None), float):
            setattr(config, key, cfg.dropout)
    return config


def _blocks(net: Any) -> list[str]:
    """Return the names of the modules of ``net`` that must not be split; if it names none, the entries of its lists."""
    wanted = {*(getattr(net, "_no_split_modules", None) or [])}
    named = [(NET + name, module) for name, module in net.named_modules() if name]
    found = [name for name, module in named if type(module).__name__ in wanted]
    if not found:
        lists = [(name, module) for name, module in named if isinstance(module, nn.ModuleList)]
        found = [f"{name}.{number}" for name, module in lists for number in range(len(module))]
    return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]


def _owners(names: Iterable[str]) -> set[str]:
    """Return the names of all modules that contain one of the modules ``names``."""
    parts = [name.split(".") for name in names]
    return {".".join(each[:end]) for each in parts for end in range(len(each))}


def _initialize(net: Any, names: set[str]) -> None:
    """Let the library initialize the modules ``names`` of its model: inner ones first, each by the model it is in."""
    base = _library().PreTrainedModel

    def visit(module: nn.Module, path: str, owner: Any) -> None:
        owner = module if isinstance(module, base) else owner
        for name, child in module.named_children():
            if f"{path}.{name}" in names:
                visit(child, f"{path}.{name}", owner)
        owner._init_weights(module)

    visit(net, NET.rstrip("."), net)


def _readers(
    net: Any, files: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, Callable[[], Tensor]], list[str]]:
    """Return functions that read the weights of ``net`` from ``files``, by their names in it, and what does not fit.

    The library renames weights, and computes some from several of a file, such as the experts of a layer.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    ours = net.state_dict()
    every: list[Any] = get_model_conversion_mapping(net)
    renamings = [each for each in every if not isinstance(each, WeightConverter)]
    converters = [each for each in every if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    readers: dict[str, Callable[[], Tensor]] = {}
    joined: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, net.base_model_prefix, ours)
        if name not in ours and key in ours:
            name, pattern = key, None
        if name not in ours:  # of another part, such as a head that is not used
            continue
        if pattern is None:
            readers[name] = partial(files.__getitem__, key)
        else:
            joined.setdefault(name, []).append((key, pattern))
    found = {name: shapes[reader.args[0]] for name, reader in readers.items()}  # type: ignore[attr-defined]
    for name, sources in joined.items():

        def convert(read: Callable[[str], Tensor], name: str = name, sources: Any = sources) -> dict[str, Any]:
            converter: Any = deepcopy(by_pattern[sources[0][1]])
            for key, pattern in sources:
                converter.add_tensor(name, key, pattern, read(key))
            made = converter.convert(name, model=net, config=net.config)
            return {target: each[0] if isinstance(each, list) else each for target, each in made.items()}

        made = convert(lambda key: torch.empty(shapes[key], device="meta"))
        found |= {target: tensor.shape for target, tensor in made.items()}
        readers |= {target: partial(_converted, convert, files, target) for target in made}
    problems = [
        f"{name} has the shape {[*shape]}, and the model's config.json makes it {[*ours[name].shape]}"
        for name, shape in found.items()
        if name in ours and ours[name].shape != shape
    ]
    return {name: reader for name, reader in readers.items() if name in ours}, problems


def _converted(convert: Callable[[Any], Mapping[str, Tensor]], files: Mapping[str, Tensor], name: str) -> Tensor:
    return convert(files.__getitem__)[name]
