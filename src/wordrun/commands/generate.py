"""``wordrun generate run=DIR prompt=TEXT``: stream text from a run's checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wordrun.commands.chat import Chat, Screen, converse
from wordrun.common.errors import UserError
from wordrun.common.section import Section
from wordrun.common.validation import not_negative, one_of, positive
from wordrun.config.arguments import run
from wordrun.data.options import ANSWERED
from wordrun.train.options import DTYPES

if TYPE_CHECKING:
    import torch

    from wordrun.checkpoint.load import Saved
    from wordrun.model.base import Model

USAGE = """\
Generate text from a trained model.

  wordrun generate run=outputs/latest prompt="ROMEO:"
  wordrun generate run=outputs/latest                        # on a terminal: a conversation
  wordrun generate run=outputs/latest prompt=$'First line\\nSecond line\\n' length=200
  wordrun generate run=outputs/latest num_samples=3 top_k=null top_p=0.9
  wordrun generate run=outputs/latest checkpoint=best seed=7 > sample.txt

The text is streamed to standard output, everything else goes to standard error.
The same options produce the same text. See docs/generate.md for details.
"""


@dataclass
class GenerateConfig(Section):
    """The model and the sampling options."""

    run: str = "outputs/latest"
    """Run directory, or a checkpoint in it."""
    prompt: str | None = None
    """Text to continue; in the shell, write a line break as $'\\n'. null: a conversation if this is a terminal, else a
    line break. If it has no tokens, the text begins with the end-of-text token, which is not shown."""
    length: int = 500
    """Number of tokens to generate after the prompt."""
    num_samples: int = 1
    """Number of samples, generated as one batch: the first is streamed, the others follow."""
    temperature: float = 0.8
    """Sampling temperature; lower is more deterministic."""
    top_k: int | None = 200
    """Sample from the k most likely tokens; 1 is greedy decoding, null is no limit."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with at least this total probability."""
    seed: int = 1337
    """Random seed for sampling."""
    slide: int = 1
    """Tokens to drop from the beginning of the context when it is full (model.block_size). The rest is then recomputed:
    with 1 that happens for every token, which is slow; a quarter of block_size is fast but shortens the context."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: str = "model"
    """model, or ema for the averaged weights of a run with hooks=[ema]."""
    device: str = "auto"
    """auto (an accelerator if there is one), cpu, cuda or xpu."""
    dtype: str = "auto"
    """Precision of weights and computation: fp32, bf16, fp16, or auto (bf16 if the device supports it at
    full speed, else fp32)."""

    def problems(self) -> Iterable[str]:
        yield from not_negative("", self, "length")
        yield from positive("", self, "num_samples", "slide")
        yield from one_of("device", self.device, ["auto", "cpu", "cuda", "xpu"])
        yield from one_of("dtype", self.dtype, DTYPES)
        if self.prompt == "":
            yield "prompt is empty: start with some text, such as a line break (prompt=$'\\n')"
        if not 0 < self.temperature < float("inf"):
            yield f"temperature={self.temperature:g} should be above 0; for greedy decoding use top_k=1"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k} should be at least 1; for no limit use top_k=null"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p:g} should be above 0 and at most 1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    try:
        return run(GenerateConfig, USAGE, write, argv)
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    except BrokenPipeError:  # the reader closed the pipe; avoids another write error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def write(options: GenerateConfig) -> None:
    """Generate text according to ``options`` on standard output."""
    # Imported here so that --help and error messages do not wait for torch.
    import torch

    from wordrun.backend.mixed_precision import TORCH_DTYPES, choose_dtype
    from wordrun.checkpoint.load import find
    from wordrun.data.tokenizers import construction as tokenizers
    from wordrun.dist import World
    from wordrun.dist.device import choose_device
    from wordrun.model.generate import generate_by

    device = choose_device(options.device, World())
    asked = DTYPES[options.dtype]
    dtype = choose_dtype(asked, device)
    if dtype != TORCH_DTYPES.get(asked, dtype):
        _say(f"dtype={asked}: this {device.type} would emulate it, and computes in fp32 instead")
    saved = find(Path(options.run), options.checkpoint)
    saved.require_text()
    tokenizer = tokenizers.from_checkpoint(saved.tokenizer_json, saved.tokenizer_file)
    talks = options.prompt is None and options.num_samples == 1 and sys.stdin.isatty() and sys.stdout.isatty()
    begin, hidden = torch.empty(0, dtype=torch.int64), 0
    if not talks:
        tokens, hidden = tokenizer.encode_prompt("\n" if options.prompt is None else options.prompt, "prompt")
        begin = torch.from_numpy(tokens)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while reading its checkpoints
        model = read_model(saved, device, dtype, options.weights)
    _say(
        f"{saved.folder}: {saved.config.model.name}, {model.num_parameters():,} parameters, "
        f"{str(dtype).removeprefix('torch.')} on {device}"
    )
    _say(_training(saved))
    block_size = saved.config.text_model.block_size
    data, stops = saved.config.text, list(model.stops()) if tokenizer.kind == "hf" else []
    sampled = partial(
        generate_by(model, device),
        length=options.length,
        block_size=block_size,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if talks:
        slide = max(options.slide, block_size // 4)  # or each token would recompute a full context
        converse(Chat(partial(sampled, slide=slide), tokenizer, data, stops))
        return
    ends: list[int] = []  # tokens that are not shown
    if data.kind in ANSWERED and options.num_samples == 1:
        stops = ends = Chat(sampled, tokenizer, data, stops).stop
    if options.num_samples > 1:
        print(_title(1, options))
    show = Screen(tokenizer.decode)
    show(begin[hidden:].tolist())
    start = time.perf_counter()
    texts = sampled(
        begin.expand(options.num_samples, -1),
        slide=options.slide,
        stop=stops,
        on_tokens=lambda column: None if int(column[0]) in ends else show(column[:1].tolist()),
    )
    seconds = time.perf_counter() - start
    show.end()
    for number, text in enumerate(texts[1:].numpy(), start=2):
        print(_title(number, options))
        print(tokenizer.decode(text[hidden:]), flush=True)
    count = options.num_samples * (texts.shape[1] - len(begin))
    _say(f"{count} token{'s' * (count != 1)} in {seconds:.1f} s: {count / max(seconds, 1e-9):.1f} tokens/s")


def read_model(saved: Saved, device: torch.device, dtype: torch.dtype, which: str = "model") -> Model:
    """Return the checkpoint's model in evaluation mode, with its weights ``which`` in ``dtype`` on ``device``."""
    from wordrun.model.generate import why_silent

    model = saved.meta_model()
    if reason := why_silent(model, saved.vocab_size, saved.config.text_model.block_size):
        raise UserError(f"{saved.folder} cannot generate text: {reason}")
    return saved.load_model(device, dtype, which)


def _training(saved: Saved) -> str:
    """Return how long the model has been trained, and its loss, with that of an untrained model for comparison."""
    tokens, metrics = saved.manifest.get("tokens"), saved.manifest.get("metrics")
    losses = metrics if isinstance(metrics, dict) else {}
    name = next((name for name in ("val_loss", "loss") if isinstance(losses.get(name), float)), "")
    on = f" on {tokens:,} tokens" if isinstance(tokens, int) else ""
    loss = ""
    if name:
        split = "validation" if name == "val_loss" else "training"
        bpb = f", {losses['val_bpb']:.2f} bits per byte" if isinstance(losses.get("val_bpb"), float) else ""
        loss = f"; {split} loss {losses[name]:.2f} (untrained: {math.log(saved.vocab_size):.2f}){bpb}"
    return f"trained for {saved.step:,} step{'s' * (saved.step != 1)}{on}{loss}"


def _title(number: int, options: GenerateConfig) -> str:
    return f"--- {number} of {options.num_samples} ---"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
