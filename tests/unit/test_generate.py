"""Generation: the same tokens with a KV cache as without, and the command."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import BPE

from wordrun import model as models
from wordrun.checkpoint.load import Saved
from wordrun.commands.generate import Screen, _training, main
from wordrun.config.schema import Config
from wordrun.data.tokenizers.base import END
from wordrun.data.tokenizers.char import CharTokenizer
from wordrun.data.tokenizers.subword import HFTokenizer
from wordrun.model.generate import Cached, Graphed, draw, generate
from wordrun.model.kv_cache import KVCache
from wordrun.model.options import GPTConfig, LlamaConfig, ModernConfig, TransformerConfig
from wordrun.model.transformer import Transformer

if TYPE_CHECKING:
    from conftest import Start

V = 23
BLOCK = 16
CONFIGS: dict[str, TransformerConfig] = {
    "gpt": GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK, bias=True),
    "llama": LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, block_size=BLOCK),
    "windows": LlamaConfig(
        n_layer=2, n_head=2, n_embd=32, n_hidden=48, block_size=BLOCK, window=5, global_every=2, qk_norm=True
    ),
    "modern": ModernConfig(
        n_layer=2,
        n_head=4,
        n_embd=32,
        block_size=BLOCK,
        ngram_rows=[40, 40],
        value_layers=[0, -1],
        softcap=15.0,
        zero_init=False,
    ),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Transformer:
    """A small model with confident predictions: its weights are far from their initial values."""
    model = models.build(CONFIGS[request.param], V, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6)
    return model.eval()


def tokens(B: int = 3, T: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_k": 5, "temperature": 0.8}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9, "slide": 6}],
    ids=["greedy", "top-k", "top-p", "sliding by 6"],
)
@pytest.mark.parametrize("T", [1, 4, 40])
@pytest.mark.parametrize("kind", [Cached, Graphed])
def test_tokens_are_those_without_a_cache(
    model: Transformer, options: dict[str, Any], T: int, kind: type[Cached], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts at once, far across the limit of block_size, and across that of the first fixed cache."""
    monkeypatch.setattr("wordrun.model.generate.LEAST_ROOM", 4)
    without = generate(lambda x: model(x, at=-1), tokens(T=T), 3 * BLOCK, block_size=BLOCK, seed=2, **options)
    cached = kind(model)
    assert cached(tokens(T=2)).shape == (3, V)  # another text, which must not affect the next
    assert generate(cached, tokens(T=T), 3 * BLOCK, block_size=BLOCK, seed=2, **options).equal(without)
    assert without[:, T:].unique().numel() > 5


@pytest.mark.parametrize("kind", [Cached, Graphed])
def test_logits_are_those_without_a_cache_however_many_tokens_come_at_once(
    model: Transformer, kind: type[Cached]
) -> None:
    x, cached = tokens(T=BLOCK), kind(model)
    for T in (3, 4, 9, 10, BLOCK):  # 3, 1, 5, 1, 6 new ones
        expected = model(x[:, :T], at=-1)
        assert expected.std() > 0.3
        torch.testing.assert_close(cached(x[:, :T]), expected, rtol=1e-5, atol=1e-5)


def test_the_model_reads_each_token_once_until_the_text_outgrows_it(model: Transformer) -> None:
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(Cached(model), tokens(T=6), BLOCK + 1, block_size=BLOCK)
    assert widths == [6, *[1] * (BLOCK - 6), *[BLOCK] * 6]
    widths.clear()
    generate(Cached(model), tokens(T=6), BLOCK + 4, block_size=BLOCK, slide=8)
    # Full after 10 further tokens: the last 9 are read again, and each new one once, until it is full again.
    assert widths == [6, *[1] * 10, 9, *[1] * 7, 9]


def test_a_text_that_differs_is_read_from_its_beginning(model: Transformer) -> None:
    cached, x = Cached(model), tokens(T=6)
    cached(x)
    other = torch.cat((tokens(T=6, seed=1), tokens(T=1)), 1)
    for text in (other, x[:1], x[:1, :3], torch.cat((x, tokens(T=2)), 1)):
        torch.testing.assert_close(cached(text), model(text, at=-1), rtol=1e-5, atol=1e-5)


def test_each_stage_of_a_pipeline_has_caches_of_its_own(model: Transformer) -> None:
    cfg = replace(model.cfg, n_layer=2)
    parts = [models.meta_model(cfg, V, [layer]) for layer in (0, 1)]
    for part in parts:
        part.load_state_dict({name: model.state_dict()[name] for name in part.state_dict()}, assign=True)
    x, caches = tokens(T=9), [[KVCache()], [KVCache()]]
    for start, end in ((0, 5), (5, 6), (6, 9)):
        hidden = parts[0](x[:, start:end], caches=caches[0])
        logits = parts[1](hidden, at=-1, caches=caches[1], **model.in_every_stage(x[:, start:end]))
        torch.testing.assert_close(logits, model(x[:, :end], at=-1), rtol=1e-5, atol=1e-5)


def test_a_cache_returns_everything_appended_to_it() -> None:
    cache, stream = KVCache(), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 40, 8, generator=stream)
    start = 0
    for T in (1, 1, 5, 1, 20, 12):
        k, v = cache.append(keys[:, :, start : start + T], values[:, :, start : start + T])
        start += T
        assert cache.length == start
        assert k.equal(keys[:, :, :start])
        assert v.equal(values[:, :, :start])


def test_tokens_are_passed_on_as_they_are_sampled(model: Transformer) -> None:
    columns: list[torch.Tensor] = []
    reads: list[int] = []

    def logits_of(text: torch.Tensor) -> torch.Tensor:
        reads.append(len(columns))
        return model(text, at=-1)  # type: ignore[no-any-return]

    text = generate(logits_of, tokens(), 5, block_size=BLOCK, on_tokens=columns.append)
    assert reads == [0, 1, 2, 3, 4]
    assert torch.stack(columns, 1).equal(text[:, 4:])


# Sampling


def drawn(probabilities: list[list[float]], top_k: int | None = None, top_p: float = 1.0) -> list[set[int]]:
    """Return the tokens that 2000 samples from each of ``probabilities`` contain."""
    stream = torch.Generator().manual_seed(1)
    logits = torch.tensor(probabilities).log()
    draws = torch.cat([draw(logits, 1.0, top_k, top_p, stream) for _ in range(2000)], 1)
    return [set(row.tolist()) for row in draws]


def test_top_p_samples_from_the_smallest_set_that_reaches_it() -> None:
    rows = [[0.1, 0.5, 0.1, 0.3], [0.25, 0.2, 0.3, 0.25], [0.97, 0.01, 0.01, 0.01]]
    assert drawn(rows, top_p=0.4) == [{1}, {0, 2}, {0}]
    assert drawn(rows, top_p=0.6) == [{1, 3}, {0, 2, 3}, {0}]
    assert drawn(rows, top_p=0.001) == [{1}, {2}, {0}]
    assert drawn(rows, top_p=1.0) == [{0, 1, 2, 3}] * 3


def test_top_p_applies_after_top_k() -> None:
    # The more likely of the top two has 5 / 8.
    assert drawn([[0.1, 0.5, 0.1, 0.3]], top_k=2, top_p=0.6) == [{1}]
    assert drawn([[0.1, 0.5, 0.1, 0.3]], top_k=2, top_p=0.7) == [{1, 3}]


def test_draws_from_top_p_follow_the_probabilities() -> None:
    N = 20_000
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3]).log().expand(N, 4)
    shares = draw(logits, 1.0, None, 0.7, torch.Generator().manual_seed(0))[:, 0].bincount(minlength=4) / N
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.625, 0.0, 0.375]), atol=0.012, rtol=0)


# The command


KNOWS = "The quick brown fox jumps over the lazy dog.\n"


@pytest.fixture(scope="module")
def run(save_run: Callable[..., Transformer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with two checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    for step in (100, 200):
        save_run(folder, "model=llama_debug", step=step, text=KNOWS)
    return folder


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_command_writes_what_the_model_does(
    run: Path, save_run: Callable[..., Transformer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with the same weights, without a cache, from Python."""
    model, tokenizer = save_run(tmp_path / "other", "model=llama_debug", step=200, text=KNOWS), CharTokenizer(KNOWS)
    prompt = torch.from_numpy(tokenizer.encode("fox")).expand(2, 3)
    options: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "temperature": 0.9, "seed": 3}
    texts = generate(lambda x: model(x, at=-1), prompt, 20, block_size=model.cfg.block_size, **options)
    words = [
        f"run={run}",
        "prompt=fox",
        "length=20",
        "dtype=fp32",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    one, two = (tokenizer.decode(text.numpy()) for text in texts)
    assert one != two
    assert written(capsys, *words, "num_samples=2") == f"--- 1 of 2 ---\n{one}\n--- 2 of 2 ---\n{two}\n"
    alone = written(capsys, *words)
    assert alone.startswith("fox")
    assert len(alone) == len("fox") + 20 + len("\n")
    assert written(capsys, *words) == alone
    assert written(capsys, *words, "seed=4") != alone


def test_the_checkpoint_is_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prompt=fox", "top_k=1", "length=12")
    latest = written(capsys, f"run={run}", *words)
    assert written(capsys, f"run={run}", "checkpoint=200", *words) == latest
    assert written(capsys, f"run={run / 'checkpoints' / 'step-00000200'}", *words) == latest
    assert written(capsys, f"run={run}", "checkpoint=100", *words) != latest


def test_the_precision_and_the_model_go_to_standard_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"run={run}", "length=2", "dtype=fp16"]) == 0
    said = capsys.readouterr()
    assert "dtype=fp16: this cpu would emulate it" in said.err
    assert "step-00000200: llama_debug, " in said.err
    assert "parameters, float32 on cpu\ntrained for 200 steps\n2 tokens in " in said.err
    assert len(said.out) == len("\n") + 2 + len("\n")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["run=nowhere"], 2, "nowhere is not a folder: name a run directory"),
        (["run=."], 2, "contains no checkpoint: it is not a run directory"),
        (["checkpoint=150"], 2, "has no checkpoint 150: available are latest and steps 100, 200"),
        (["checkpoint=best"], 2, "has no checkpoint best"),
        (["prompt=foxé"], 2, "prompt: the text 'foxé' has characters that the vocabulary of 30 lacks: 'é'"),
        (["prompt="], 2, "prompt= has no value"),
        (["lenght=3", "top_k=x"], 2, "unknown option 'lenght'; did you mean 'length'?\ntop_k=x should be a whole"),
        (["length=1e2"], 2, "length=1e2: write 100, without a point or an exponent"),
        (["max_tokens=9"], 2, "unknown option 'max_tokens'; --help lists the options"),
        (["temperature=0", "top_p=1.5", "top_k=0"], 2, "temperature=0 should be above 0; for greedy"),
        (["temperature=0", "top_p=1.5", "top_k=0"], 2, "\ntop_k=0 should be at least 1; for no limit use top_k="),
        (["temperature=0", "top_p=1.5", "top_k=0"], 2, "\ntop_p=1.5 should be above 0 and at most 1\n"),
        (["length=-1", "num_samples=0"], 2, "length=-1 should not be negative\nnum_samples=0 should be at least 1\n"),
        (["slide=0", "device=gpu", "dtype=fp8"], 2, "slide=0 should be at least 1\ndevice=gpu should be one of auto,"),
    ],
)
def test_mistakes_are_named(
    run: Path, words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"run={run}", *words]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err


def test_the_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "  num_samples=1           Number of samples" in said
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("by", ["ctrl-c", "head"])
def test_text_is_streamed_until_it_is_interrupted(run: Path, by: str, start: Start) -> None:
    words = [f"run={run}", "prompt=fox", "length=1000000"]
    process = start(sys.executable, "-m", "wordrun.commands.generate", *words)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10).startswith("fox")
    if by == "head":
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(60) == 0
    else:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert out.endswith("\n")
        assert "Traceback" not in err


def test_a_character_is_printed_when_it_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are bytes here; an umlaut takes two."""
    show = Screen(lambda tokens: np.array(tokens, dtype=np.uint8).tobytes().decode(errors="replace"))
    seen = []
    for byte in "aüb".encode() + b"\xc3":
        show([byte])
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "ü", "b", ""]
    show.end()
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


def streamed(decode: Callable[[Any], str], prompt: list[int], ids: list[int]) -> str:
    """Return what is printed of ``prompt``, and of ``ids`` token by token; few are decoded at a time."""

    def counted(window: Any) -> str:
        assert len(window) <= max(33, len(prompt) + 4)
        return decode(window)

    with contextlib.redirect_stdout(io.StringIO()) as out:
        show = Screen(counted)
        show(prompt)
        for token in ids:
            show([token])
        show.end()
    return out.getvalue().removesuffix("\n")


PIECES = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁The", "▁", "▁▁", "fox", "▁über", ".", "x"]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
"""The decoder of Llama 2 and Mistral."""


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), LLAMA], ids=["metaspace", "llama"])
def test_streamed_sentence_pieces_are_the_text_of_all_tokens(decoder: Any) -> None:
    """Whose first space is dropped, and whose other characters may be several tokens, of a byte each."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    library = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoder
    tokenizer, draw = HFTokenizer(library.to_str(), eot=1), random.Random(1)
    assert tokenizer.decode(np.array([vocabulary[piece] for piece in ("▁The", "▁über", "fox")])) == "The überfox"
    letters = [[2 + byte for byte in letter.encode()] for letter in "ü€😀日"] if decoder is LLAMA else []
    for _ in range(150):
        units = [*([number] for number in (1, *range(258, len(PIECES)))), *letters]
        parts = draw.choices(units, k=draw.randrange(1, 80))
        prompt, ids = ([number for part in some for number in part] for some in (parts[:3], parts[3:]))
        assert streamed(tokenizer.decode, prompt, ids) == tokenizer.decode(np.array([*prompt, *ids]))


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        (["fox", "über", "😀", "", END], " "),
        ([bytes([byte]) for byte in (97, 0xC3, 0xBC, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)], b""),
        ([b"\xc3", b"\xbc\xc3", b"\xbc", b"\xe2\x82", b"\xac\xe2\x82", b"\xacx", b"a", b"\xf0\x9f"], b""),
    ],
    ids=["words", "bytes", "across characters"],
)
def test_streamed_tokens_are_the_text_of_all_tokens(pieces: list[Any], joined: Any) -> None:
    """Also of tokens that are no text, as an untrained model draws them."""

    def decode(ids: Any) -> str:
        text = joined.join(pieces[number] for number in ids)
        return text if isinstance(text, str) else text.decode(errors="replace")

    draw = random.Random(1)
    for _ in range(150):
        weights = [draw.random() ** 3 for _ in pieces]
        ids = draw.choices(range(len(pieces)), weights, k=draw.randrange(1, 120))
        cut = draw.choice([0, 3, 40])
        assert streamed(decode, ids[:cut], ids[cut:]) == decode(ids)


@pytest.mark.parametrize("facts", [{}, {"tokens": "many", "metrics": None}, {"tokens": [], "metrics": {"loss": "x"}}])
def test_a_strange_record_of_training_is_not_an_error(facts: dict[str, Any]) -> None:
    saved = Saved(Path(), 7, Config(), "", 64, facts)
    assert _training(saved) == "trained for 7 steps"
    assert _training(replace(saved, step=1)) == "trained for 1 step"
    assert _training(replace(saved, manifest={"metrics": {"loss": 1.5}})).endswith("loss 1.50 (untrained: 4.16)")
