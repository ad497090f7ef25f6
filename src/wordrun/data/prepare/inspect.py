"""Statistics of a prepared data set: counts, longest documents, first sequences, and histograms."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wordrun.config.schema import Config
from wordrun.data import manifest as manifests
from wordrun.data.options import ANSWERED
from wordrun.data.order import Sequences
from wordrun.data.shards import Tokens, examine, plain
from wordrun.data.tokenizers.base import Tokenizer

LONGEST = 5
SEQUENCES = 4
SHOWN = 160
"""Number of characters to show of a document or sequence."""
COMMON = 20
"""Number of most frequent tokens to show."""
COUNTED = 2**26
"""Maximum number of tokens to count, in evenly spaced shards."""


def inspect(folder: Path, cfg: Config, screen: Console) -> None:
    """Show statistics of the prepared data set in ``folder`` on ``screen``, and save histograms with it."""
    manifest = manifests.load(folder)
    tokenizer = manifests.tokenizer(folder, manifest)
    found = documents(folder, manifest)
    sizes = np.array([size for size, _, _ in found])
    counts, counted = frequencies(folder, manifest)
    used = int((counts > 0).sum())
    print_ = screen.print
    print_(f"\nvocabulary: {manifest.vocab_size:,} tokens, of which {used:,} occur among the {counted:,} counted")
    print_(_common(counts, counted, tokenizer))
    if found:
        low, middle, high = np.percentile(sizes, [5, 50, 95])
        print_(
            f"training documents: {len(sizes):,}, {sizes.min():,} to {sizes.max():,} tokens, median {middle:,.0f}, "
            f"90 % between {low:,.0f} and {high:,.0f}"
        )
        print_(_longest(folder, found, tokenizer))
    if manifest.settings["kind"] not in ANSWERED:
        print_(_sequences(folder, manifest, cfg, tokenizer))
    picture = (folder if os.access(folder, os.W_OK) else Path.cwd()) / "inspect.png"
    draw(picture, manifest, counts, sizes)
    print_(f"histograms: {picture}", soft_wrap=True)


def documents(folder: Path, manifest: manifests.Manifest) -> list[tuple[int, manifests.Entry, int]]:
    """Return the length, shard and first token of every training document; one that spans shards counts to the end of
    its first."""
    found = []
    for entry in manifest.train:
        starts = manifests.document_starts(folder, entry).tolist()
        found += [(b - a, entry, a) for a, b in itertools.pairwise([*starts, entry.tokens])]
    return found


def frequencies(folder: Path, manifest: manifests.Manifest) -> tuple[NDArray[np.int64], int]:
    """Return how often each token occurs in a part of the training data, and the size of that part in tokens."""
    step = max(1, -(-manifest.tokens("train") // COUNTED))
    tokens = manifests.split(folder, manifest, "train", examine=False)
    counts, counted = np.zeros(manifest.vocab_size, dtype=np.int64), 0
    for shard in tokens.shards[::step]:
        content = plain(Tokens([shard])[: COUNTED - counted])
        counts += np.bincount(content, minlength=manifest.vocab_size)
        counted += len(content)
        if counted >= COUNTED:
            break
    return counts, counted


def _common(counts: NDArray[np.int64], counted: int, tokenizer: Tokenizer) -> Table:
    table = Table("token", "text", "share", title="most frequent tokens", title_justify="left")
    for token in np.argsort(-counts, kind="stable")[:COMMON].tolist():
        if counts[token]:
            table.add_row(str(token), Text(repr(tokenizer.decode(np.array([token])))), f"{counts[token] / counted:.2%}")
    return table


def _longest(folder: Path, found: list[tuple[int, manifests.Entry, int]], tokenizer: Tokenizer) -> Table:
    table = Table("tokens", "shard", "position", "beginning", title="longest documents", title_justify="left")
    for size, entry, start in sorted(found, key=lambda document: -document[0])[:LONGEST]:
        shard = Tokens([examine(folder / entry.file, entry.tokens)])
        table.add_row(f"{size:,}", entry.file, f"{start:,}", _text(tokenizer, shard[start : start + min(size, SHOWN)]))
    return table


def _sequences(folder: Path, manifest: manifests.Manifest, cfg: Config, tokenizer: Tokenizer) -> Table:
    title = f"first training sequences with model.block_size={cfg.text_model.block_size} train.seed={cfg.train.seed}"
    table = Table("index", "position", "text", title=title, title_justify="left")
    tokens = manifests.split(folder, manifest, "train", examine=False)
    sequences = Sequences(tokens, cfg.text_model.block_size, cfg.train.seed)
    for index in range(min(SEQUENCES, sequences.per_epoch)):
        row = sequences.batch(index, 1).tokens[0].numpy()
        table.add_row(str(index), f"{sequences.starts(index, 1)[0]:,}", _text(tokenizer, row))
    return table


def _text(tokenizer: Tokenizer, tokens: NDArray[np.integer]) -> Text:
    text = tokenizer.decode(plain(tokens))
    return Text(repr(text[:SHOWN])[1:-1] + " ..." * (len(text) > SHOWN))


def draw(path: Path, manifest: manifests.Manifest, counts: NDArray[np.int64], lengths: NDArray[np.integer]) -> None:
    """Draw histograms of document lengths and token frequencies as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{manifest.name}: {manifest.tokens('train'):,} training tokens, {len(lengths):,} documents")
    if len(lengths) > 1:
        edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, 41).round())
        left.hist(lengths, bins=edges, color="#4477aa")
        left.set_xscale("log")
        left.set(xlabel="tokens in a document", ylabel="documents", title="Document length")
    else:
        left.set_axis_off()
        left.text(0.5, 0.5, "one document", ha="center")
    ranked = np.sort(counts[counts > 0])[::-1]
    right.loglog(np.arange(1, len(ranked) + 1), ranked / ranked.sum(), color="#aa3377")
    right.set(xlabel="rank of the token", ylabel="share of all tokens", title="Token frequency")
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
