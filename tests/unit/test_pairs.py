"""Fine-tuning on prompts and answers: what a sequence holds, and what its loss is the mean of."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from wordrun import Trainer, compose, dist
from wordrun.commands import ls
from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.data.batch import Batch
from wordrun.data.corpus import Corpus, corpus_of_run
from wordrun.data.loader import Loader
from wordrun.data.options import TextConfig
from wordrun.data.order import order_of_run, pairs_of_run
from wordrun.data.pairs import IGNORED
from wordrun.data.shards import plain
from wordrun.data.tokenizers.base import END
from wordrun.data.tokenizers.huggingface import chat_template
from wordrun.data.validation_set import ValidationPairs, ValidationSequences
from wordrun.model.construction import build
from wordrun.train import language
from wordrun.train.accuracy import accuracy
from wordrun.train.options import MetricConfig

WORDS = ["data=pairs", "data.path=pairs.jsonl", "tokenizer=byte", "data.shard_mb=1", "model.block_size=32"]
EOT = 256


def write_pairs(count: int = 40) -> list[tuple[str, str]]:
    """Write pairs of different lengths, and return them."""
    draw = random.Random(1)
    pairs = [(f"{n}+{n}=" + "?" * draw.randrange(4), f"{2 * n}" * draw.randrange(1, 5)) for n in range(count)]
    Path("pairs.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    return pairs


def corpus_of(*words: str) -> tuple[Config, Corpus]:
    cfg = compose([*WORDS, *words])
    return cfg, corpus_of_run(cfg, dist.World())


def decode(batch: Batch, row: int) -> list[tuple[str, str]]:
    """Return the pairs of a sequence, as far as its inputs and targets show them."""
    inputs, targets = batch.tokens[row].tolist(), batch.targets[row].tolist()
    found, prompt, answer = [], bytearray(), bytearray()
    for token, target in zip(inputs, targets, strict=True):
        if target == EOT:
            found.append(((prompt + bytes([token])).removesuffix(answer).decode(), answer.decode()))
            prompt, answer = bytearray(), bytearray()
        else:
            prompt += bytes([token] if token != EOT else [])
            answer += bytes([target] if target != IGNORED else [])
    return found


@pytest.mark.parametrize("several", [True, False])
def test_an_epoch_has_every_pair_once_and_whole(several: bool) -> None:
    pairs = write_pairs()
    cfg, corpus = corpus_of(f"data.mask_documents={several}")
    order = order_of_run(cfg, corpus)
    for epoch in range(2):
        batch = order.batch(epoch * order.per_epoch, order.per_epoch)
        found = [decode(batch, row) for row in range(order.per_epoch)]
        seen = list(chain.from_iterable(found))
        val = set(pairs) - set(seen)
        assert sorted(seen) == sorted(set(pairs) - val)
        assert len(val) == 4
        assert {len(each) for each in found} == {1} if not several else max(map(len, found)) > 1
    rows = pairs_of_run(cfg, corpus, corpus.val)
    held_out = rows.empty(len(rows))
    rows.fill(held_out, np.arange(len(rows)))
    assert {pair for row in range(len(rows)) for pair in decode(held_out, row)} == val


def test_a_pair_sees_only_itself() -> None:
    write_pairs()
    cfg, corpus = corpus_of("model.n_layer=1", "model.n_embd=16", "model.n_head=2")
    batch = order_of_run(cfg, corpus).batch(0, 4)
    assert batch.documents is not None
    other = batch.tokens.clone()
    other[batch.documents == 1] = 65
    model = build(cfg.model, EOT + 1).eval()
    a, b = (model(tokens, documents=batch.documents) for tokens in (batch.tokens, other))
    later = batch.documents > 1
    assert later.any()
    torch.testing.assert_close(a[later], b[later])


def test_the_loss_is_the_mean_over_all_answers_of_a_step_for_any_division() -> None:
    write_pairs()
    cfg, corpus = corpus_of("model.n_layer=1", "model.n_embd=16", "model.n_head=2")
    model, order = build(cfg.model, EOT + 1), order_of_run(cfg, corpus)
    whole = order.batch(8, 8)
    logits = model(whole.tokens, documents=whole.documents)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.targets.flatten())
    assert len(set((whole.targets != IGNORED).sum(1).tolist())) > 1, "equal counts would hide a mean of means"
    for size, gas, ranks in ((8, 1, 1), (2, 2, 2), (1, 2, 4)):
        loaders = [Loader(order, size, gas, rank, ranks, prefetch=0) for rank in range(ranks)]
        losses = [model.losses(batch).mean() for loader in loaders for batch in loader.step(1)]
        torch.testing.assert_close(torch.stack(losses).mean(), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_validation_loss_is_the_mean_over_all_answers(ranks: int) -> None:
    write_pairs(200)
    cfg, corpus = corpus_of("model.n_layer=1", "model.n_embd=16", "model.n_head=2", "data.mask_documents=false")
    model, rows = build(cfg.model, EOT + 1), pairs_of_run(cfg, corpus, corpus.val)
    whole = rows.empty(len(rows))
    rows.fill(whole, np.arange(len(rows)))
    logits = model(whole.tokens, documents=whole.documents)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.targets.flatten())
    answers = whole.targets != IGNORED
    hits = (logits.argmax(-1) == whole.targets)[answers].float().mean()
    total = torch.zeros(4, dtype=torch.float64)
    for rank in range(ranks):
        fixed = ValidationSequences(ValidationPairs(rows), 3, None, rank, ranks)
        for i in range(len(fixed)):
            batch, weights = fixed[i]
            losses, outputs = model.losses_and_outputs(batch)
            values = (model.losses(batch), losses, accuracy(MetricConfig(), outputs, batch), torch.ones(len(losses)))
            total += torch.stack([(each * weights).sum() for each in values]).detach()
    found = (total[:3] / total[3]).tolist()
    assert found == pytest.approx([expected.item(), expected.item(), hits.item()], rel=1e-6)


LINES = [
    {"task": "Add", "input": "1 2", "label": "3", "of": {"n": 1, "list": ["a", True]}},
    {"task": "Add", "input": "", "label": "0", "of": {"n": 2.5, "list": ["b", False]}},
]
KEYS = ["data.prompt_key=task", "data.answer_key=label", "data.val_fraction=0.5"]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{prompt} {input} -> {answer}", ["Add 1 2 -> 3", "Add  -> 0"]),
        ("{task}: {label} ({input})", ["Add: 3 (1 2)", "Add: 0 ()"]),
        (
            '{{"q": {prompt} {of.n}}} {of.list.0} {of.list.1} {answer}',
            ['{"q": Add 1} a true 3', '{"q": Add 2.5} b false 0'],
        ),
    ],
)
def test_a_template_may_have_any_field_of_the_line(template: str, written: list[str]) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    _, corpus = corpus_of(*KEYS, f"data.template='{template}'")
    found = [corpus.tokenizer.decode(plain(tokens[:])) for tokens in (corpus.train, corpus.val)]
    assert [text.strip("\0").removeprefix(END) for text in found] == written


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt} {imput} {answer}", r"has the field imput; did you mean 'input'\? \(the fields are input, label, of"),
        ("{prompt} {of.m} {answer}", r"has the field of\.m"),
        ("{prompt} {of} {answer}", r"\(line 1\) has no text in the field of .* \{of.KEY\} \(n, list\)"),
        ("{prompt} {answer} {task}", "should contain {prompt} and then {answer}"),
        ("{prompt} {input {answer}", "write {NAME} for a field of the line"),
        ("{prompt} {input!r} {answer}", "write {NAME} for a field of the line"),
    ],
)
def test_a_field_that_a_template_cannot_have_is_named(template: str, message: str) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with pytest.raises(ConfigError, match=message):
        corpus_of(*KEYS, f"data.template='{template}'")


def test_transformers_writes_the_other_fields_of_a_message() -> None:
    jinja2 = pytest.importorskip("jinja2")
    data = TextConfig(kind="pairs", template='{{"Q"}} {prompt}\n{input} \\ é: {answer} ({n}).')
    render = jinja2.Template(chat_template(data.template_parts(), END)).render
    asked = {"role": "user", "content": "why"}
    assert render(messages=[asked]) == f'{END}{{"Q"}} why\n \\ é: ' == END + data.turn("why")[0]
    answered = [asked | {"input": "in"}, {"role": "assistant", "content": "so", "n": 3}]
    assert render(messages=answered) == f'{END}{{"Q"}} why\nin \\ é: so (3).'


def test_a_sample_is_the_answer_to_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs()
    words = ["model=nano", "model.n_layer=1", "tracker=jsonl", "train.device=cpu", "train.sample_tokens=12"]
    with Trainer(compose([*WORDS, *words, "data.template='Q: {prompt} A: {answer}.'"])) as trainer:
        replies = [*b"42.", EOT, *b"Q: and so on"]
        asked: list[list[int]] = []

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            asked.append(tokens[0].tolist())
            return torch.nn.functional.one_hot(torch.tensor([replies[len(asked) - 1]]), EOT + 1) * 1e9

        monkeypatch.setattr(language, "predictor", lambda model: logits)
        assert trainer.generate("6*7") == "Q: 6*7 A: 42."
        assert asked[0] == [EOT, *b"Q: 6*7 A: "]
        assert len(asked) == 12
        asked.clear()
        shown = trainer.generate()
        assert re.fullmatch(r"Q: (\d+)\+\1=\?* A: 42\.", shown)
        batch, _ = trainer.evaluation.validation[0]
        assert asked[0] == batch.tokens[0, : len(asked[0])].tolist()


def test_the_template_surrounds_prompt_and_answer() -> None:
    write_pairs()
    cfg, corpus = corpus_of("data.template='Q: {prompt} A: {answer}.'", "data.mask_documents=false")
    prompt, answer = decode(order_of_run(cfg, corpus).batch(0, 1), 0)[0]
    assert (prompt[:3], prompt[-4:], answer[-1]) == ("Q: ", " A: ", ".")


def test_a_pair_that_is_too_long_loses_its_end() -> None:
    Path("pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": "p" * 20, "answer": "a" * 90}) + "\n" for _ in "12345")
    )
    cfg, corpus = corpus_of("data.val_fraction=0.2", "data.too_long=truncate")
    batch = order_of_run(cfg, corpus).batch(0, 1)
    assert batch.tokens[0].tolist() == [EOT, *b"p" * 20, *b"a" * 11]
    assert batch.targets[0].tolist() == [IGNORED] * 20 + [*b"a" * 12]


def test_pairs_that_lose_their_answer_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A batch of them would have no loss."""
    lengths = [20, 31, 32, 40, 5]  # of the prompts; a sequence is 32 tokens, the first one the end-of-text token
    pairs = [{"prompt": "p" * n, "answer": "a" * 3} for n in lengths for _ in range(4)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    cfg, corpus = corpus_of("data.val_fraction=0.5", "data.too_long=truncate")
    order = order_of_run(cfg, corpus)
    assert order.per_epoch == 5  # two short ones share a sequence
    assert (order.batch(0, 5).targets != IGNORED).any(1).all()
    assert caplog.messages[-1] == (
        "model.block_size=32: 6 of the 10 pairs for train are too long: 2 lose the end of the answer, and 4, which are "
        "skipped, all of it (data.too_long=truncate; the longest prompt has 41 tokens)"
    )


def test_pairs_that_all_lose_their_answer_are_refused() -> None:
    Path("pairs.jsonl").write_text((json.dumps({"prompt": "p" * 90, "answer": "a"}) + "\n") * 20)
    cfg, corpus = corpus_of()
    with pytest.raises(ConfigError, match="block_size=32 leaves no answer of any of the 18 pairs for train: the"):
        order_of_run(cfg, corpus)


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        (["tokenizer=char"], None, "data.kind=pairs needs an end-of-text token"),
        (["data.template='{answer}'"], None, "should contain {prompt} and then {answer}"),
        (["data.align=true"], None, "data.align=true has no effect on pairs"),
        (["data.prompt_key=question"], None, "has no text in the field data.prompt_key=question, only the fields"),
        ([], '{"prompt": "p", "answer": ""}\n', "(line 1) has an empty answer"),
        ([], '{"prompt": "p", "answer": 3}\n', "has no text in the field data.answer_key=answer"),
        (["data.path=pairs.txt"], None, "pairs.txt is not a .jsonl file"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], text: str | None, says: str) -> None:
    write_pairs()
    Path("pairs.txt").write_text("text")
    if text:
        Path("pairs.jsonl").write_text(text)

    def begin() -> None:
        cfg, corpus = corpus_of(*words)
        order_of_run(cfg, corpus)

    with pytest.raises(ConfigError) as caught:
        begin()
    assert says in str(caught.value)


def test_shards_of_pairs_are_not_read_as_text(tmp_path: Path) -> None:
    write_pairs()
    corpus_of(f"data.prepared={tmp_path}/made")
    made = f"{tmp_path}/made"
    for words in (["data=shards", f"data.path={made}"], ["data=text", "data.path=a", f"data.prepared={made}"]):
        with pytest.raises(ConfigError, match=r"prepared with data\.kind"):
            corpus_of_run(compose([*words, "tokenizer=byte"]), dist.World())
    with pytest.raises(ConfigError, match=r"prepared with data\.template"):
        corpus_of(f"data.prepared={tmp_path}/made", "data.template='{prompt} {answer}'")


def test_bits_per_byte_are_those_of_the_answers_and_shown_with_every_loss(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = write_pairs()
    words = ["model=nano", "model.n_layer=1", "tracker=jsonl", "train.device=cpu", "train.sample_tokens=0"]
    words += ["train.max_iters=1", "train.best_metric=val_bpb", "hydra.run.dir=outputs/run"]
    with Trainer(compose([*WORDS, *words])) as trainer:
        summary, values = trainer.train(), trainer.measure()
    answers = [answer for _, answer in pairs[9::10]]  # each ends with a token that has no bytes
    nats = values["val_loss"] * sum(len(answer) + 1 for answer in answers)
    expected = nats / math.log(2) / sum(map(len, answers))
    assert summary.val_bpb == summary.best_value == values["val_bpb"] == pytest.approx(expected)
    assert json.loads(Path("outputs/run/run.json").read_text())["val_bpb"] == values["val_bpb"]
    ls.main([])
    assert f"{expected:.4f}" in capsys.readouterr().out
    assert f"val_bpb {expected:.4g}" in Path("outputs/run/log.txt").read_text()
