"""The language modeling task: corpus, tokenizer, model and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wordrun import dist
from wordrun.backend.base import Backend
from wordrun.checkpoint.load import find
from wordrun.common.errors import ConfigError
from wordrun.common.log import LOGGER
from wordrun.config.registry import check_has_huggingface_format, part_of
from wordrun.config.rules import vocab_multiple
from wordrun.config.schema import Config
from wordrun.data.batch import Batch
from wordrun.data.chat_template import template_of
from wordrun.data.corpus import Corpus, corpus_of_run
from wordrun.data.loader import Loader
from wordrun.data.options import ANSWERED
from wordrun.data.order import order_of_run, pairs_of_run
from wordrun.data.pairs import READ
from wordrun.data.prepare.sources import locate
from wordrun.data.shards import ANSWER, plain
from wordrun.data.validation_set import ValidationPairs, ValidationSequences, ValidationTokens
from wordrun.dist.mesh import Layout
from wordrun.model import huggingface_files, lora, nanogpt, pretrained
from wordrun.model.base import Model
from wordrun.model.construction import meta_model, new_model
from wordrun.model.generate import generate, predictor, why_silent
from wordrun.model.options import TransformerConfig
from wordrun.model.transformer import Transformer
from wordrun.plan.parameter_shapes import ModelShapes, shapes_of
from wordrun.train.hooks.base import Hook
from wordrun.train.hooks.standard import Sample
from wordrun.train.metrics import evaluation_mode
from wordrun.train.options import TrainConfig
from wordrun.train.task import Task, flops_of, require_same_shapes

EPOCHS = 40
"""Above this number of epochs a model without dropout learns almost nothing new (Muennighoff et al. 2023)."""
EPOCHS_WITH_DROPOUT = 100
"""The same with dropout; experiment=shakespeare has 82."""
FIELDS = ("tokens", "targets", "documents", "scale")
"""What a model's ``losses`` can read of a batch."""
SAMPLE = "sample"
"""Name and kind of the embedded text."""


class LanguageTask(Task):
    """The corpus of a run, its tokenizer, its training and validation sequences, and samples from the model.

    Raises:
        ConfigError: corpus, tokenizer and options are incompatible.
    """

    unit = "sequences"
    tokens_per_example: int

    def __init__(self, cfg: Config, world: dist.World, layout: Layout, data: Corpus, banner: str | None = None) -> None:
        super().__init__(cfg, world, layout, data, banner)
        self.corpus = data
        self.banner = banner or self.corpus.banner
        self.tokenizer = self.corpus.tokenizer
        self.tokenizer_json = self.tokenizer.to_json()
        self.vocab_size = self.tokenizer.vocab_size
        multiple = vocab_multiple(cfg, layout.tp, on_cpu=torch.device(world.device).type == "cpu")
        self.make_model = partial(new_model, cfg.model, vocab_size=self.vocab_size)
        self.meta_model: Model = self.make_model()
        if isinstance(self.meta_model, Transformer):
            self.make_model = partial(self.make_model, multiple=multiple)
        self.no_samples = self.tokenizer.missing or why_silent(
            self.meta_model, self.vocab_size, cfg.text_model.block_size
        )
        self._check_vocabulary()
        self._check_reads()
        self.template = template_of(cfg.text, self.tokenizer) if cfg.data.kind == "chat" else None
        self.stops = self.template.stops(self.tokenizer) if self.template else self.tokenizer.stops
        self.sequences = order_of_run(cfg, self.corpus)
        if self._samples():  # now rather than after the first steps
            self._begin(cfg.train.sample_prompt, "train.sample_prompt", ", or train.sample_tokens=0 for no samples")
        self.base: dict[str, str] = {}
        """For LoRA, the source and the checksum of the frozen weights."""
        self.tokens_per_example = cfg.text_model.block_size
        self.flops_per_example = self._flops()

    @classmethod
    def settle(cls, cfg: Config, world: dist.World) -> tuple[Config, str | None]:
        """Return ``cfg`` for the text that is trained on, and a banner if data.offline=sample has replaced the text.

        If so, the run is named after the sample everywhere, also in its directory.
        """
        if cfg.data.kind != "download":
            return cfg, None
        banner = dist.broadcast(locate(cfg.text).banner if world.rank == 0 else None, world)
        if banner is None:
            return cfg, None
        parts = Path(cfg.run_dir).parts
        moved = Path("outputs", SAMPLE, *parts[2:]) if parts[:2] == ("outputs", cfg.data.name) else Path(cfg.run_dir)
        data = replace(cfg.text, name=SAMPLE, kind=SAMPLE)
        return replace(cfg, data=data, run_dir=str(moved) if cfg.run_dir else ""), banner

    @classmethod
    def check_source(cls, cfg: Config, source: str) -> None:
        vocab_size = cfg.tokenizer.known_vocab_size
        if source.startswith("hf:"):
            check_has_huggingface_format(cfg.model)
            if not isinstance(cfg.model, TransformerConfig):  # checked with the model
                return
            folder = huggingface_files.fetch(source.removeprefix("hf:"))
            pretrained.open_weights(folder, lora.without(cfg.transformer), vocab_size)
            return
        if source.startswith(nanogpt.PREFIX):
            if not isinstance(cfg.model, TransformerConfig) or cfg.lora_rank:
                raise ConfigError(f"train.init_from={source} is for a complete GPT: use model=nano, without LoRA")
            nanogpt.open_weights(source.removeprefix(nanogpt.PREFIX), cfg.model, vocab_size)
            return
        super().check_source(cfg, source)
        if isinstance(cfg.model, TransformerConfig):
            saved = find(Path(source), check=False)
            saved.require_text()
            model = meta_model(lora.without(cfg.model), vocab_size or saved.vocab_size)
            require_same_shapes(source, saved, cfg, model)

    @classmethod
    def open(cls, cfg: Config, world: dist.World) -> Corpus:
        """Return the text as tokens, which one rank of each file system prepares if necessary."""
        return corpus_of_run(cfg, world)

    @classmethod
    def shapes(cls, cfg: Config, data: Corpus | None = None) -> ModelShapes | None:
        """Return the shapes of the run's model; None: it is not a transformer, or its vocabulary is not known yet."""
        vocab_size = cfg.tokenizer.known_vocab_size if data is None else data.tokenizer.vocab_size
        if vocab_size is None or not isinstance(cfg.model, TransformerConfig):
            return None
        return shapes_of(cfg.model, vocab_size, split=not cfg.backend.replicated)

    def _flops(self) -> int | None:
        # Without the vocabulary's padding, so that every layout reports the MFU of the same work.
        model, size = self.meta_model, self.cfg.text_model.block_size
        if isinstance(model, Transformer):
            return model.flops_per_token() * size
        tokens, targets = torch.empty(2, 1, size, dtype=torch.int64, device="meta")
        return flops_of(model, Batch(tokens, targets, eot=0, scale=torch.empty((), device="meta")))

    def _check_reads(self) -> None:
        """Raise a ConfigError if the data need more than what the model's ``losses`` reads, as ``uses`` declares."""
        data, name, uses = self.cfg.text, type(self.meta_model).__name__, self.meta_model.uses
        if not isinstance(uses, tuple) or not {*uses} <= {*FIELDS}:
            raise ConfigError(f"{name}.uses={uses!r} should be a tuple of fields of a batch: {', '.join(FIELDS)}")
        needed = {"documents": data.mask_documents, "scale": data.kind in ANSWERED}
        if undeclared := [field for field, need in needed.items() if need and field not in uses]:
            if undeclared == ["documents"] and not part_of("model", self.cfg.model).origin:
                raise ConfigError(
                    f"model={self.cfg.model.name}: this model does not separate the documents of a sequence, as "
                    f"data={data.name} asks: use data.mask_documents=false"
                )
            option = " with data.mask_documents=true" if data.mask_documents else ""
            raise ConfigError(
                f"model={self.cfg.model.name} cannot be trained on data={data.name}{option}: {name} does not declare "
                f"that its losses read {' and '.join(f'batch.{each}' for each in undeclared)}, and they would be "
                f"wrong otherwise: use them in losses and write uses = {(*uses, *undeclared)} in {name}, or choose "
                "other data",
                page="extend/model.md#a-model",
            )

    def _check_vocabulary(self) -> None:
        data, size = self.cfg.data.name, getattr(self.cfg.model, "vocab_size", None) or self.vocab_size
        if size < self.vocab_size:
            raise ConfigError(
                f"model.vocab_size={size} is too small for data={data}, whose vocabulary has {self.vocab_size} tokens: "
                f"leave it out, or use at least {self.vocab_size}"
            )

    def _samples(self) -> bool:
        """Return whether the run generates samples."""
        return self.cfg.train.sample_tokens > 0 and not self.no_samples

    def initial_weights(
        self, world: dist.World, stored: Mapping[str, Any] = MappingProxyType({})
    ) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that train.init_from names or, if LoRA is resumed, those that it began with."""
        cfg, folder = self.cfg, None
        source = lora.base_source(cfg, stored)
        if source is None:
            return self.meta_model.own_weights()
        if source.startswith("hf:"):
            weights = self._weights_from_hf(source, world)
        elif source.startswith(nanogpt.PREFIX):
            path = source.removeprefix(nanogpt.PREFIX)
            weights = nanogpt.open_weights(path, self.cfg.transformer, self.vocab_size)
        else:
            folder, weights = self.weights_in(source, world)
        if cfg.lora_rank:
            self.base = lora.describe_base(weights, self.initial_model, folder, cfg, world, stored)
        return weights

    @property
    def initial_model(self) -> Model:
        """The model without LoRA's adapters."""
        if not self.cfg.lora_rank:
            return self.meta_model
        return meta_model(lora.without(self.cfg.transformer), self.vocab_size)

    def _weights_from_hf(self, source: str, world: dist.World) -> Mapping[str, torch.Tensor]:
        check_has_huggingface_format(self.cfg.model)
        folder = dist.broadcast(huggingface_files.fetch(source.removeprefix("hf:")) if world.rank == 0 else None, world)
        if not isinstance(self.meta_model, Transformer):
            return self.meta_model.read_huggingface(folder)
        return pretrained.open_weights(folder, lora.without(self.cfg.transformer), self.vocab_size)

    def loader(self, gas: int, device: torch.device) -> Loader:
        size, prefetch = self.cfg.model.batch_size, self.cfg.data.prefetch
        return Loader(self.sequences, size, gas, self.dp_rank, self.layout.dp, device, prefetch)

    def validation_set(self, count: int | None) -> ValidationSequences:
        """Return this rank's share of ``count`` validation sequences (None: all)."""
        model, val = self.cfg.text_model, self.corpus.val
        shares = [(len(each.val), each.fraction) for each in self.corpus.mix]
        data = (
            ValidationPairs(pairs_of_run(self.cfg, self.corpus, val))
            if self.cfg.data.kind in ANSWERED
            else ValidationTokens(val, model.block_size, self.sequences.document, shares)
        )
        return ValidationSequences(data, model.batch_size, count, self.dp_rank, self.layout.dp)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity and, if the bytes of the text are known, the bits per byte as ``bpb``."""
        found, size = {"perplexity": math.exp(min(means["loss"], 700))}, self.corpus.bytes_per_token
        return found if size is None else {**found, "bpb": means["loss"] / math.log(2) / size}

    def hooks(self) -> list[Hook]:
        """Return the hooks of this task: samples, if the tokenizer has its vocabulary."""
        return [Sample()] if self._samples() else []

    def generate(  # type: ignore[override]
        self,
        backend: Backend,
        prompt: str | None = None,
        length: int | None = None,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> str:
        """Return ``prompt`` and its generated continuation, for pairs the answer; every rank must call this.

        Args:
            backend: holds the model.
            prompt: to be continued; None: train.sample_prompt or, for pairs, by default the first validation prompt.
            length: number of tokens to generate; None: train.sample_tokens.
            temperature: divides the logits; None: train.temperature.
            top_k: sample from the k most likely tokens; None: train.top_k.
            seed: random seed for sampling; None: train.seed.
        """
        if self.no_samples:
            raise ConfigError(f"cannot generate text: {self.no_samples}")
        train = self.cfg.train
        prompt = train.sample_prompt if prompt is None else prompt
        length = train.sample_tokens if length is None else length
        temperature = train.temperature if temperature is None else temperature
        top_k = train.top_k if top_k is None else top_k
        if not prompt or length < 0 or not temperature > 0 or (top_k is not None and top_k < 1):
            raise ConfigError(
                f"cannot generate with prompt={prompt!r}, length={length}, temperature={temperature}, top_k={top_k}: "
                "the prompt must not be empty (use a line break), length must be at least 0, temperature above 0 and "
                "top_k at least 1"
            )
        begin, hidden = self._begin(prompt)
        tokens = torch.from_numpy(begin)[None].to(backend.device)
        vocab_size = self.meta_model.vocab_size if isinstance(self.meta_model, Transformer) else self.vocab_size
        predict = self._predictor(backend)

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            # Without the vocabulary's padding, so that every layout draws the same tokens.
            return predict(tokens)[:, :vocab_size]

        # Without torch.compile, which would recompile for each length of the growing text.
        with evaluation_mode(backend), torch.compiler.set_stance("force_eager"):
            text = generate(
                logits_of,
                tokens,
                length,
                block_size=self.cfg.text_model.block_size,
                temperature=temperature,
                top_k=top_k,
                seed=train.seed if seed is None else seed,
            )
        return self.tokenizer.decode(self._shown(text[0].cpu().numpy(), len(begin))[hidden:])

    def _predictor(self, backend: Backend) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from tokens (B, T) to the logits of the next one, with a KV cache on a complete model."""
        if not self.cfg.backend.replicated:
            return backend.logits
        context = torch.autocast(backend.device.type, dtype=backend.dtype, enabled=backend.dtype != torch.float32)
        return context(predictor(backend.parts[0]))  # type: ignore[no-any-return]

    def _begin(self, prompt: str, key: str = "prompt", or_else: str = "") -> tuple[NDArray[Any], int]:
        """Return the tokens that a sample continues, and how many of them are not shown.

        For pairs, they are the end-of-text token, which is not shown, and what precedes the answer; for conversations,
        what precedes the assistant's turn. ``key`` and ``or_else`` are those of ``Tokenizer.encode_prompt``.
        """
        kind = self.cfg.data.kind
        if kind not in ANSWERED:
            return self.tokenizer.encode_prompt(prompt, key, or_else)
        if prompt == TrainConfig.sample_prompt:
            pairs = self.corpus.val[:READ]
            return plain(pairs[: 1 + np.flatnonzero(pairs[1:] & ANSWER)[0]]).astype(np.int64), int(kind == "pairs")
        if self.template is not None:
            text = self.template.render([{"role": "user", "content": prompt}], ask=True)
            return self.tokenizer.encode_spans(text, ())[0], 0
        assert self.tokenizer.eot is not None, "pairs need one"
        tokens, hidden = self.tokenizer.encode_prompt(self.cfg.text.turn(prompt)[0], key, or_else)
        return (tokens if hidden else np.append(self.tokenizer.eot, tokens)).astype(np.int64), 1

    def _shown(self, text: NDArray[Any], begin: int) -> NDArray[Any]:
        """Return what to show of a sample whose first ``begin`` tokens were given: of an answer, what precedes its end.

        All ranks generate the full length, because ranks that stopped at different lengths would wait for each other.
        """
        if self.cfg.data.kind not in ANSWERED:
            return text
        ends = np.flatnonzero(np.isin(text[begin:], self.stops))
        return text[: begin + ends[0] if len(ends) else None]

    def facts(self) -> dict[str, Any]:
        corpus, active = self.corpus, self.meta_model.num_active_parameters()
        return {
            "data": {
                "origin": corpus.origin,
                "banner": self.banner,
                "vocab_size": self.vocab_size,
                "train_tokens": len(corpus.train),
                "val_tokens": len(corpus.val),
            },
            "parameters": self.meta_model.num_parameters(),
            **({"active_parameters": active} if active < self.meta_model.num_parameters() else {}),
        }

    def fixed(self) -> dict[str, Any]:
        base = {"the base model's weights (train.init_from)": self.base["digest"]} if self.base else {}
        return {"the vocabulary": self.vocab_size, "the number of training tokens": len(self.corpus.train), **base}

    def manifest(self, position: int) -> dict[str, Any]:
        base = {"base": self.base} if self.base else {}
        return {"tokens": position * self.tokens_per_example, "vocab_size": self.vocab_size, **base}

    def announce(self, examples: int) -> None:
        corpus, epochs = self.corpus, examples / self.sequences.per_epoch
        LOGGER.info(
            "data %s: %s; %s training and %s validation tokens, vocabulary %d; %.2f epochs of sequences of %d tokens",
            self.cfg.data.name,
            corpus.origin,
            f"{len(corpus.train):,}",
            f"{len(corpus.val):,}",
            self.vocab_size,
            epochs,
            self.tokens_per_example,
        )
        dropout = getattr(self.cfg.model, "dropout", 0)
        most = EPOCHS_WITH_DROPOUT if dropout else EPOCHS
        if epochs > most:
            steps = max(1, int(self.cfg.train.max_iters * most / epochs))
            LOGGER.warning(
                "the run makes %.0f passes over its training text and may memorize it, so that the validation "
                "loss rises: use train.max_iters=%d or fewer, more text, %s or hooks=[early_stop]",
                epochs,
                steps,
                "a larger model.dropout" if dropout else "model.dropout=0.2",
            )
        if self.no_samples and self.cfg.train.sample_tokens:
            LOGGER.warning("no samples: %s", self.no_samples)
        data, prompt = self.cfg.text, self.cfg.train.sample_prompt
        if self._samples() and data.kind == "pairs" and data.other_fields() and prompt != TrainConfig.sample_prompt:
            fields = ", ".join(f"{{{name}}}" for name in data.other_fields())
            LOGGER.warning("samples of train.sample_prompt leave %s of data.template empty", fields)
        if self.banner:
            LOGGER.warning("%s\n%s\n%s", "*" * 80, self.banner, "*" * 80)
