"""The data's figures: characters beside nanoGPT, byte pairs beside their library, ranks, loading, start-up.

    python benchmarks/data.py --nanogpt CLONE --text FILE [chars bpe ranks load step start]

What is compared runs in turns in the same call, and the figure is the median of the rounds. "Per core" is measured in
processor time, which other programs on the machine disturb less than the clock's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wordrun.data.loader import Loader
from wordrun.data.manifest import Entry, Manifest
from wordrun.data.options import TextConfig
from wordrun.data.order import Sequences
from wordrun.data.prepare import run, tokenize, writer
from wordrun.data.prepare.sources import locate
from wordrun.data.prepared import open_prepared
from wordrun.data.shards import Tokens, examine
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.char import ByteTokenizer
from wordrun.data.tokenizers.options import (
    BPETokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    TokenizerConfig,
)
from wordrun.dist import World

COPIES = 48
"""Times that the text is repeated for the characters: some seconds of work for nanoGPT, and one work item for us."""
BLOCK, BATCH = 1024, 16


def cpu_seconds(action: Callable[[], object]) -> float:
    """Return the processor time that ``action`` takes in this process."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def in_turns(rounds: int, *actions: Callable[[], float]) -> list[list[float]]:
    """Return the results of each action, taken in turns after a first round that does not count."""
    results: list[list[float]] = [[] for _ in actions]
    for number in range(rounds + 1):
        for result, action in zip(results, actions, strict=True):
            value = action()
            if number:
                result.append(value)
    return results


def row(name: str, value: str, wanted: str = "") -> None:
    """Print a row of the table."""
    print(f"| {name} | {value} | {wanted} |", flush=True)


def prepare(data: TextConfig, tokenizer: TokenizerConfig, folder: Path) -> None:
    """Prepare ``data`` in ``folder``, where nothing is."""
    run.execute(run.begin(locate(data), tokenizer, folder), World())


def characters(scratch: Path, nanogpt: Path, text: str, rounds: int) -> None:
    """nanoGPT's prepare.py, unchanged and in this process, and ours, on the same file."""
    whole = text * COPIES
    (scratch / "input.txt").write_text(whole)
    script = (nanogpt / "data" / "shakespeare_char" / "prepare.py").read_text()
    (scratch / "prepare.py").write_text(script)
    # It downloads only where the file is missing; requests is imported in any case.
    code = compile(script, str(scratch / "prepare.py"), "exec")
    told = {"__file__": str(scratch / "prepare.py"), "__name__": "__main__"}

    def theirs() -> float:
        with open(os.devnull, "w") as quiet:
            sys.stdout, before = quiet, sys.stdout
            try:
                return cpu_seconds(lambda: exec(code, dict(told)))
            finally:
                sys.stdout = before

    data = TextConfig("chars", path=str(scratch / "input.txt"))

    def ours() -> float:
        shutil.rmtree(scratch / "chars", ignore_errors=True)
        return cpu_seconds(lambda: prepare(data, CharTokenizerConfig(), scratch / "chars"))

    ours_s, theirs_s = in_turns(rounds, ours, theirs)
    same = np.fromfile(scratch / "train.bin", dtype=np.uint16)
    _, train, *_ = open_prepared(scratch / "chars", data, CharTokenizerConfig())
    assert np.array_equal(train[:], same)  # the same tokens
    ratio = statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
    row("characters, tokens/s per core", f"{len(whole) / statistics.median(ours_s):,.0f}")
    row("nanoGPT's prepare.py, tokens/s per core", f"{len(whole) / statistics.median(theirs_s):,.0f}")
    row(f"ratio, median of {rounds} rounds", f"{ratio:.1f}", "at least 10")


def corpus(folder: Path, text: str, megabytes: int, files: int) -> None:
    """Write documents of some paragraphs each as .jsonl files."""
    paragraphs = text.split("\n\n")
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for number in range(files):
        with open(folder / f"{number}.jsonl", "w") as file:
            while file.tell() < megabytes * 1e6 / files:
                start = int(rng.integers(len(paragraphs) - 20))
                document = "\n\n".join(paragraphs[start : start + int(rng.integers(2, 20))])
                file.write(json.dumps({"text": document}) + "\n")


def byte_pairs(scratch: Path, text: str, rounds: int) -> None:
    """All work from a .jsonl file to shards, beside the library's own call on the texts alone; one thread each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    corpus(scratch / "one", text, 4, 1)
    out = scratch / "bpe"
    out.mkdir(exist_ok=True)
    (out / "work").mkdir(exist_ok=True)
    words = tokenizers.build(BPETokenizerConfig(), [text])
    (out / "tokenizer.json").write_text(words.to_json())
    data = TextConfig("bpe", path=str(scratch / "one"))
    source = locate(data)
    (item,) = source.items()
    texts = [json.loads(line)["text"] for line in (scratch / "one" / "0.jsonl").read_text().splitlines()]
    library = words._fast  # type: ignore[attr-defined]
    ours_s, theirs_s = in_turns(
        rounds,
        lambda: cpu_seconds(lambda: tokenize.process("shards", item, source, out, lambda *counts: None)),
        lambda: cpu_seconds(lambda: library.encode_batch(texts, add_special_tokens=False)),
    )
    tokens = sum(entry["tokens"] for entry in json.loads((out / "work" / "000000.shards.json").read_text())["train"])
    ratio = statistics.median(a / b for a, b in zip(ours_s, theirs_s, strict=True))
    row("byte pairs, tokens/s per core, .jsonl to shards", f"{tokens / 0.9 / statistics.median(ours_s):,.0f}")
    row(f"time over that of tokenizers' encode_batch, median of {rounds} rounds", f"{ratio:.3f}", "at most 1.05")
    del os.environ["TOKENIZERS_PARALLELISM"]


def ranks(scratch: Path, text: str, rounds: int) -> None:
    """The command on one rank and on two, one process each, without the start of the ranks; wall time.

    Beside it two independent preparations of one half each: the upper bound for the cores of this machine.
    """
    halves = [scratch / "many" / half for half in ("a", "b")]
    for half in halves:
        half.parent.mkdir(exist_ok=True)
        corpus(half, text, 60, 12)  # large enough that the start of the processes does not matter
    words = tokenizers.build(BPETokenizerConfig(), [text])
    (scratch / "tokenizer.json").write_text(words.to_json())

    def begin(size: int, path: Path, out: Path) -> subprocess.Popen[str]:
        shutil.rmtree(out, ignore_errors=True)
        return subprocess.Popen(
            [
                "launch",
                "-n",
                str(size),
                sys.executable,
                *shlex.split("-m wordrun.data.prepare data=text data.workers=1"),
                f"data.path={path}",
                f"tokenizer.path={scratch / 'tokenizer.json'}",
                f"data.prepared={out}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=scratch,
        )

    def seconds(*processes: subprocess.Popen[str]) -> float:
        said = [process.communicate()[0] for process in processes]
        found = [re.search(r"prepared data=text in ([\d.]+) s", each) for each in said]
        if None in found:
            raise SystemExit("\n".join(said))
        return max(float(match[1]) for match in found if match)

    one, two, apart = in_turns(
        rounds,
        lambda: seconds(begin(1, scratch / "many", scratch / "one")),
        lambda: seconds(begin(2, scratch / "many", scratch / "two")),
        lambda: seconds(*(begin(1, half, scratch / half.name) for half in halves)),
    )
    row(
        "byte pairs, 1 rank / 2 ranks / 2 independent processes [s]",
        " / ".join(f"{statistics.median(x):.1f}" for x in (one, two, apart)),
    )
    for name, times, wanted in (("2 ranks", two, "at least 1.8"), ("2 independent processes", apart, "upper bound")):
        ratios = [a / b for a, b in zip(one, times, strict=True)]
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        row(
            f"times as fast on {name}, median of {rounds} rounds ({spread})", f"{statistics.median(ratios):.2f}", wanted
        )


def simulated(scratch: Path) -> Iterator[tuple[int, Tokens]]:
    """Yield 10^6 to 10^12 tokens: links to one file, so that all of it is in the cache, but every name is opened."""
    per = writer.SHARD_TOKENS
    rng = np.random.default_rng(1)
    for exponent in (6, 8, 10, 12):
        folder = scratch / f"1e{exponent}"
        folder.mkdir()
        count, size = max(1, round(10**exponent / per)), min(per, 10**exponent)
        writer.write_shard(folder / "0.bin", [rng.integers(0, 50257, size, dtype=np.uint16)], "<u2")
        for number in range(1, count):
            os.link(folder / "0.bin", folder / f"{number}.bin")
        np.fromfile(folder / "0.bin", dtype=np.uint8)
        yield exponent, Tokens([examine(folder / f"{number}.bin") for number in range(count)])
        shutil.rmtree(folder)


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def load(scratch: Path, rounds: int) -> None:
    """Batches of 16 x 1,024 tokens in random order, built in one thread, once every file has been opened."""
    import torch

    torch.set_num_threads(1)
    before = resident()
    for exponent, tokens in simulated(scratch):
        first = np.arange(len(tokens.shards), dtype=np.int64) * writer.SHARD_TOKENS
        begin = time.perf_counter()
        tokens.rows(first, BLOCK + 1)
        opening_s = time.perf_counter() - begin
        loader = Loader(Sequences(tokens, BLOCK, seed=1), BATCH, prefetch=0)
        step, steps, speeds = 0, 200, []
        for _ in range(rounds + 1):
            begin, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                loader.step(step)
                step += 1
            speeds.append(steps * BATCH * BLOCK / np.array([time.process_time() - begin, time.perf_counter() - wall]))
        core, clock = np.median(speeds[1:], axis=0)
        row(
            f"loading from 10^{exponent} tokens, tokens/s per core (by the clock)",
            f"{core:,.0f} ({clock:,.0f})",
            "at least 4,000,000",
        )
        row(f"to open its {len(first):,} files [s]", f"{opening_s:.2f}")
        row(f"memory that loading from 10^{exponent} tokens adds [MB]", f"{resident() - before:.0f}", "less than 50")


def step(scratch: Path, text: str) -> None:
    """The time that a step of the small model waits for its batches, with and without prefetching."""
    import wordrun
    from wordrun.train.trainer import Trainer

    (scratch / "step.txt").write_text(text)
    for prefetch in (2, 0):
        waited = [0.0]
        cfg = wordrun.compose(
            [
                "data=text",
                f"data.path={scratch / 'step.txt'}",
                "tokenizer.vocab_size=512",
                "tracker=jsonl",
                "train.max_iters=60",
                f"data.prefetch={prefetch}",
                "train.eval_interval=0",
                "train.sample_tokens=0",
                f"hydra.run.dir={scratch / f'step{prefetch}'}",
            ]
        )
        with Trainer(cfg) as trainer:
            build = trainer._micro_batches

            def timed(build: Callable[[], object] = build, waited: list[float] = waited) -> object:
                begin = time.perf_counter()
                batches = build()
                waited[0] += time.perf_counter() - begin
                return batches

            trainer._micro_batches = timed  # type: ignore[method-assign,assignment]
            summary = trainer.train()
        how = "prefetched" if prefetch else "not prefetched"
        row(f"share of a step that waits for batches, {how}", f"{waited[0] / summary.seconds:.3%}", "less than 1 %")


def start(scratch: Path, rounds: int) -> None:
    """Open a prepared data set of 10,000 shards: as the first rank of a node, which examines each, and as another."""
    folder = scratch / "start"
    folder.mkdir()
    words = ByteTokenizer().to_json().encode()
    (folder / "tokenizer.json").write_bytes(words)
    writer.write_shard(folder / "train_000000_00.bin", [np.arange(100)], "<u2")
    entries = [Entry(f"train_{n:06d}_00.bin", 100, 0, "0" * 64) for n in range(10_000)]
    for entry in entries[1:]:
        os.link(folder / entries[0].file, folder / entry.file)
    settings = {
        "kind": "file",
        "text_key": "text",
        "split": "train",
        "val_fraction": 0.1,
        "tokenizer": {"name": "byte"},
    }
    digest = hashlib.sha256(words).hexdigest()
    writer.save(folder, Manifest("many", "here", None, settings, 257, 256, digest, entries, entries[:1]))

    def seconds(examine: bool) -> float:
        begin = time.perf_counter()
        _, train, *_ = open_prepared(folder, TextConfig(), ByteTokenizerConfig(), examine=examine)
        Sequences(train, 64, seed=1).batch(0, 8)
        return time.perf_counter() - begin

    first, others = in_turns(rounds, lambda: seconds(True), lambda: seconds(False))
    row(
        "first batch from 10,000 shards, the first rank of a node [s]", f"{statistics.median(first):.2f}", "less than 1"
    )
    row("first batch of 10,000 shards, the other ranks [s]", f"{statistics.median(others):.2f}", "less than 1")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["chars", "bpe", "ranks", "load", "step", "start"]
    parser.add_argument("parts", nargs="*", default=known, help=" ".join(known))
    parser.add_argument("--nanogpt", type=Path, help="a clone of nanoGPT, for chars")
    parser.add_argument(
        "--text", type=Path, required=True, help="tiny Shakespeare, or another text of about a megabyte"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    print("| figure | measured | target |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "chars" in args.parts and args.nanogpt:
            characters(scratch, args.nanogpt.resolve(), text, args.rounds)
        if "bpe" in args.parts:
            byte_pairs(scratch, text, args.rounds)
        if "start" in args.parts:
            start(scratch, args.rounds)
        if "load" in args.parts:
            load(scratch, args.rounds)
        if "step" in args.parts:
            step(scratch, text)
        if "ranks" in args.parts:
            ranks(scratch, text, args.rounds)


if __name__ == "__main__":
    main()
