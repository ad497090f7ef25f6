"""``python -m wordrun.generate run=DIR prompt=TEXT``: text from a run's checkpoint, shown while it is written."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wordrun.config import DTYPES
from wordrun.errors import ConfigError, UserError
from wordrun.words import describe, parse

if TYPE_CHECKING:
    import torch

    from wordrun.checkpoint.saved import Saved
    from wordrun.model import Transformer

USAGE = """\
Let a trained model write.

  python -m wordrun.generate run=outputs/latest prompt="ROMEO:"
  python -m wordrun.generate run=outputs/latest prompt=$'First line\\nSecond line\\n' length=200 temperature=0.5
  python -m wordrun.generate run=outputs/latest prompt="ROMEO:" num_samples=3 top_k=null top_p=0.9
  python -m wordrun.generate run=outputs/latest checkpoint=best prompt="ROMEO:" seed=7 > sample.txt

The text goes to the standard output as it is written, everything else to the standard error. The same options give the
same text. docs/generate.md says more.
"""


@dataclass
class GenerateConfig:
    """Which model, and how it writes."""

    run: str = "outputs/latest"
    """The run directory, or one checkpoint in it."""
    prompt: str = "\n"
    """What the text begins with; a line break is written $'\\n' in the shell."""
    length: int = 500
    """Tokens to add to the prompt."""
    num_samples: int = 1
    """Texts to write, all at once: the first is shown while it is written, the others after it."""
    temperature: float = 0.8
    """Divides the logits: below 1 is safer, above 1 wilder."""
    top_k: int | None = 200
    """Draw from this many likeliest tokens; 1: always the likeliest; null: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: int = 1337
    """Of the draws."""
    slide: int = 1
    """Tokens to leave out of the beginning, each time that the text has outgrown model.block_size. The model then reads
    the rest anew: with 1 for every token, which is slow; a quarter of block_size is fast, and shows it less."""
    checkpoint: str = "latest"
    """latest, best, or the number of steps after which it was made."""
    device: str = "auto"
    """auto (the accelerator if there is one), cpu, cuda or xpu."""
    dtype: str = "auto"
    """Precision of weights and computation: fp32, bf16, fp16, or auto (bf16 where the device is fast at it, else
    fp32)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print("\n".join([USAGE, "Options:", *describe(GenerateConfig)]))
        return 0
    try:
        options, _ = parse(GenerateConfig, words)
        check(options)
        write(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    except BrokenPipeError:  # whoever reads has seen enough; at the end Python would try to write once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def check(options: GenerateConfig) -> None:
    """Refuse impossible values, all of them at once."""
    o = options
    wrong = {
        "prompt is empty: begin with something, such as a line break (prompt=$'\\n')": not o.prompt,
        f"length={o.length} should be at least 0": o.length < 0,
        f"num_samples={o.num_samples} should be at least 1": o.num_samples < 1,
        f"temperature={o.temperature:g} should be above 0; for the likeliest token always, use top_k=1": not (
            0 < o.temperature < float("inf")
        ),
        f"top_k={o.top_k} should be at least 1; for all tokens, use top_k=null": o.top_k is not None and o.top_k < 1,
        f"top_p={o.top_p:g} should be above 0 and at most 1": not 0 < o.top_p <= 1,
        f"slide={o.slide} should be at least 1": o.slide < 1,
        f"device={o.device} should be auto, cpu, cuda or xpu": o.device not in ("auto", "cpu", "cuda", "xpu"),
        f"dtype={o.dtype} should be one of {', '.join(DTYPES)}": o.dtype not in DTYPES,
    }
    problems = [problem for problem, holds in wrong.items() if holds]
    if problems:
        raise ConfigError("\n".join(problems))


def write(options: GenerateConfig) -> None:
    """Write what ``options`` ask for to the standard output."""
    # Not at the top: --help and mistakes should not wait for torch.
    import torch

    from wordrun.backend.precision import TORCH_DTYPES, choose_dtype
    from wordrun.checkpoint.saved import find
    from wordrun.data import tokenizers
    from wordrun.dist import World
    from wordrun.dist.setup import choose_device
    from wordrun.model.cache import Cached
    from wordrun.model.generate import generate

    device = choose_device(options.device, World())
    asked = DTYPES[options.dtype]
    dtype = choose_dtype(asked, device)
    if dtype != TORCH_DTYPES.get(asked, dtype):
        _say(f"dtype={asked}: this {device.type} would emulate it, and computes in fp32 instead")
    saved = find(Path(options.run), options.checkpoint)
    tokenizer = tokenizers.from_json(saved.tokenizer_json)
    try:
        prompt = torch.from_numpy(tokenizer.encode(options.prompt))
    except ConfigError as error:
        raise ConfigError(f"prompt: {error}") from None
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks while it reads its own
        model = read_model(saved, device, dtype)
    _say(
        f"{saved.folder}: {saved.config.model.name}, {model.num_parameters():,} parameters, "
        f"{str(dtype).removeprefix('torch.')} on {device}"
    )
    if options.num_samples > 1:
        print(_title(1, options))
    show = Screen(tokenizer.decode)
    show(prompt.tolist())
    start = time.perf_counter()
    texts = generate(
        Cached(model), prompt.expand(options.num_samples, -1).to(device), options.length,
        block_size=saved.config.model.block_size, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, seed=options.seed, slide=options.slide, on_tokens=lambda column: show(column[:1].tolist()),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    show.end()
    for number, text in enumerate(texts[1:].cpu().numpy(), start=2):
        print(_title(number, options))
        print(tokenizer.decode(text), flush=True)
    count = options.num_samples * options.length
    _say(f"{count} tokens in {seconds:.1f} s: {count / max(seconds, 1e-9):.1f} tokens/s")


def read_model(saved: Saved, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Return the model of a checkpoint, ready to predict, with weights of ``dtype`` on ``device``."""
    from wordrun.model import meta_model

    model = meta_model(saved.config.model, saved.vocab_size)
    state = {name: tensor.to(device, dtype) for name, tensor in saved.weights().items()}
    if model.tied:
        state["head.weight"] = state["tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.eval()


class Screen:
    """Shows a text that comes token by token, a character as soon as all of it is there."""

    def __init__(self, decode: Callable[[Any], str]) -> None:
        self.decode = decode
        self.waiting: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> None:
        """Show ``tokens``; of one that is a part of a character, nothing until the rest of it comes."""
        self.waiting += tokens
        text = self.decode(self.waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text, end="", flush=True)
            self.waiting = []

    def end(self) -> None:
        """Show what is still waiting, and end the line."""
        print(self.decode(self.waiting) if self.waiting else "", flush=True)


def _title(number: int, options: GenerateConfig) -> str:
    return f"--- {number} of {options.num_samples} ---"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
