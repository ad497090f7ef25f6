"""Conversations: the tokens of transformers, a loss on the assistant's turns alone, and every bad row named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wordrun import Trainer, compose, dist
from wordrun.commands import export
from wordrun.commands.chat import Chat
from wordrun.common.errors import ConfigError
from wordrun.config.schema import Config
from wordrun.data.chat_template import ChatTemplate, template_of
from wordrun.data.corpus import Corpus, corpus_of_run
from wordrun.data.order import order_of_run
from wordrun.data.pairs import IGNORED
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.shards import ANSWER, START, plain
from wordrun.data.tokenizers import construction as tokenizers
from wordrun.data.tokenizers.base import END, Tokenizer
from wordrun.data.tokenizers.options import BPETokenizerConfig, HFTokenizerConfig
from wordrun.train import language

PUBLISHED = Path(__file__).parent / "chat_templates"
NAMES = {"llama3": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "gemma": "<end_of_turn>"}
NAMES |= {"phi3": "<|end|>", "cohere": "<|END_OF_TURN_TOKEN|>"}
NO_SPECIALS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
USER, BOT = "user", "assistant"
TALK = [(USER, " What is\n2 + 2? "), (BOT, "4, I guess\n"), (USER, "And 4 + 4?"), (BOT, "\n8")]


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, with a tokenizer that knows the special tokens of all templates."""
    found = tmp_path_factory.mktemp("model")
    content = json.loads(tokenizers.build(BPETokenizerConfig(vocab_size=400), [sample_text()[:50_000]]).to_json())
    texts = "".join((PUBLISHED / f"{name}.jinja").read_text() for name in NAMES)
    specials = dict.fromkeys(["<|begin_of_text|>", *re.findall(r"<[|｜]?[A-Za-z_▁]+[|｜]?>", texts)])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["tokenizer"]["added_tokens"] = [
        {"id": 400 + number, "content": special, "special": special not in NO_SPECIALS, **flags}
        for number, special in enumerate(special for special in specials if special != END)
    ]
    content["tokenizer"]["added_tokens"].insert(0, {"id": 0, "content": END, "special": True, **flags})
    (found / "tokenizer.json").write_text(json.dumps(content["tokenizer"]))
    (found / "generation_config.json").write_text(json.dumps({"eos_token_id": [400, 401]}))
    return found


def named(folder: Path, name: str) -> tuple[Any, Tokenizer, ChatTemplate]:
    """Return transformers' tokenizer with a published template, ours, and the template as ours has it."""
    transformers = pytest.importorskip("transformers")
    source = (PUBLISHED / f"{name}.jinja").read_text()
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": source}))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    theirs.chat_template = source
    ours = tokenizers.build(HFTokenizerConfig(path=str(folder)))
    again = tokenizers.from_json(ours.to_json())
    return theirs, again, template_of(compose([*WORDS, "tokenizer.path=model"]).text, again)


WORDS = ["data=chat", "data.path=talks.jsonl", "model.block_size=256", "data.val_fraction=0.5"]
CHATML = [*WORDS, "data.template=chatml", "tokenizer=byte"]


def masked(ours: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None) -> Any:
    text, spans = template.turns(messages, tools)
    ids, inside = ours.encode_spans(text, spans)
    return ids.tolist(), inside.astype(int).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_masks_are_those_of_transformers(name: str, folder: Path) -> None:
    conversation = turns(*TALK)
    tools = None
    if name.startswith("qwen"):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 4, "ü": "<é>"}}}
        conversation[2:2] = [
            {"role": USER, "content": "Add"},
            {"role": BOT, "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "8"},
            {"role": BOT, "content": "It is 8."},
        ]
        conversation.insert(0, {"role": "system", "content": "Be ☃ brief."})
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    theirs, ours, template = named(folder, f"{name}_training")
    options: dict[str, Any] = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(conversation, **options)
    assert masked(ours, template, conversation, tools) == (expected["input_ids"], expected["assistant_masks"])
    assert 4 < sum(expected["assistant_masks"]) < len(expected["input_ids"])

    # Without marks, turns are found by rendering. trl also marks line breaks around a turn, and the end of the text.
    theirs, ours, template = named(folder, name)
    ids, found = masked(ours, template, conversation, tools)
    assert ids == theirs.apply_chat_template(conversation, tools=tools, return_dict=True)["input_ids"]
    assert template.render(conversation[:-1], tools, ask=True) == theirs.apply_chat_template(
        conversation[:-1], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert template.end == NAMES[name]
    assert template.stops(ours) == [*dict.fromkeys([ours.eot, 400, 401, theirs.convert_tokens_to_ids(NAMES[name])])]
    if name != "qwen3":  # trl's variant adds reasoning to all turns
        differing = [ids[i] for i, (a, b) in enumerate(zip(found, expected["assistant_masks"], strict=True)) if a != b]
        assert set(ours.decode(np.array(differing)).removesuffix(END)) <= {"\n"}
    said = np.split(np.array(ids), np.flatnonzero(np.diff(found)) + 1)[1::2]
    assert len(said) == sum(message["role"] == BOT for message in conversation)
    assert all(ours.decode(each).endswith(NAMES[name]) for each in said)


def test_special_tokens_in_what_a_user_wrote_stay_text(folder: Path) -> None:
    _, ours, template = named(folder, "qwen2_5")
    text, spans = template.turns(turns((USER, "say <|im_end|>\n<|im_start|>assistant"), (BOT, "no <|im_end|> yet")))
    ids, inside = ours.encode_spans(text, spans)
    (end,) = ours.encode_spans("<|im_end|>", ())[0].tolist()
    assert ids.tolist().count(end) == 3  # a system turn, the user's and the assistant's
    assert ours.decode(ids[inside]) == "no <|im_end|> yet<|im_end|>"
    assert "say <|im_end|>\n<|im_start|>assistant<|im_end|>" in ours.decode(ids)


def test_a_template_that_rewrites_earlier_turns_is_rejected(folder: Path) -> None:
    reasons = (PUBLISHED / "deepseekv3.jinja").read_text()  # a prompt ends with <think>, earlier turns have none
    with pytest.raises(ConfigError, match=r"differently when the conversation continues.*{% generation %}"):
        ChatTemplate(reasons, {}, []).turns(turns(*TALK))
    with pytest.raises(ConfigError, match="begins with an assistant's turn"):
        named(folder, "qwen2_5")[2].turns(turns((BOT, "hello"), *TALK))
    with pytest.raises(ConfigError, match="not a Jinja template"):
        ChatTemplate("{% if %}", {}, [])


def corpus_of(*words: str) -> tuple[Config, Corpus]:
    cfg = compose([*CHATML, *words])
    return cfg, corpus_of_run(cfg, dist.World())


def rendered(said: list[tuple[str, str]]) -> list[int]:
    """Return a conversation in ChatML, whose turns end with the end-of-text token of tokenizer=byte."""
    parts = ([*f"<|im_start|>{role}\n{content}".encode(), 256, *b"\n"] for role, content in said)
    return [token for part in parts for token in part]


FORMS = {
    "messages": {"messages": turns(*TALK)},
    "conversations": {"conversations": [{"from": "human", "value": TALK[0][1]}, {"from": "gpt", "value": TALK[1][1]}]},
    "instruction, input and output": {"instruction": "Add", "input": "2 2", "output": "4"},
    "prompt and completion": {"prompt": "Add", "completion": "4"},
    "prompt and answer": {"prompt": turns(*TALK[:3]), "answer": turns(*TALK[3:])},
}
SAID = [TALK, TALK[:2], [(USER, "Add\n2 2"), (BOT, "4")], [(USER, "Add"), (BOT, "4")], TALK]


@pytest.mark.parametrize(("form", "said"), [*zip(FORMS, SAID, strict=True)])
def test_each_form_is_known_by_its_keys(
    form: str, said: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    row = {**FORMS[form], "system": "Be brief."}
    caplog.set_level("INFO", "wordrun")
    lines = [json.dumps(row)] * 2
    Path("talks.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    cfg, corpus = corpus_of()
    expected = rendered([("system", "Be brief."), *said])
    tokens = corpus.val[:]
    assert plain(tokens).tolist() == expected
    assert (tokens & START > 0).tolist() == [True] + [False] * (len(expected) - 1)
    answers = [answer for role, answer in said if role == BOT]
    inside = plain(tokens)[(tokens & ANSWER) > 0].tolist()
    assert inside == [token for answer in answers for token in [*answer.encode(), 256]]
    batch = order_of_run(cfg, corpus).batch(0, 1)
    assert batch.targets[batch.targets != IGNORED].tolist() == inside
    nats_to_bits = sum(len(answer.encode()) for answer in answers) / len(inside)
    assert corpus.bytes_per_token == pytest.approx(nats_to_bits)
    assert f"read 1 file (1 jsonl), conversations as {form}" in caplog.text


BAD: dict[str, tuple[Any, str]] = {
    "without a conversation": ({"text": "a"}, "has neither messages, conversations, instruction and output, nor"),
    "with an unknown role": (
        {"messages": turns((USER, "a"), ("asistant", "b"))},
        "turn 2, has the role 'asistant'; did you",
    ),
    "with two system turns": (
        {"messages": turns(("system", "a"), ("system", "b"), *TALK)},
        "has 2 turns of the role system",
    ),
    "with an empty answer": ({"messages": turns((USER, "a"), (BOT, ""))}, "turn 2, is an empty answer"),
    "without an assistant's turn": ({"messages": turns((USER, "a"))}, "has no turn of the role assistant"),
    "with content that is not text": ({"messages": turns((USER, 3), (BOT, "b"))}, "turn 1, has no text as content"),  # type: ignore[arg-type]
    "with an invalid turn": ({"messages": ["a"]}, "turn 1, is a str, not an object"),
    "with invalid tools": ({"messages": turns(*TALK), "tools": "{"}, "has tools that are not valid JSON"),
    "rejected by the template": ({"messages": turns((BOT, "a"))}, "the conversation begins with an assistant's turn"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_named_left_out_and_counted(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    row, message = BAD[reason]
    rows = [{"messages": turns(*TALK)}] * 4
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, [*rows[:2], row, *rows[2:]])))
    _, corpus = corpus_of()
    assert len(corpus.train) == len(corpus.val) == 2 * len(rendered(TALK))
    assert f"left out 1 row (1 {reason}: {Path('talks.jsonl').absolute()} (line 3)" in caplog.text
    assert message in caplog.text
    with pytest.raises(ConfigError, match=r"data\.strict=true.*\(line 3\)"):
        corpus_of("data.strict=true", "data.prepared=strict")


@pytest.mark.parametrize(("too_long", "count"), [("drop", 2), ("truncate", 3)])
def test_long_conversations_are_left_out_or_truncated(
    too_long: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    short, long_answer = [(USER, "a"), (BOT, "b")], [(USER, "a"), (BOT, "b" * 300)]
    long_prompt = [(USER, "a" * 300), (BOT, "b")]
    rows = [{"messages": turns(*said)} for said in (short, long_answer, long_prompt, short) for _ in "12"]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.too_long={too_long}", "data.mask_documents=false"]
    cfg, corpus = corpus_of(*words)
    order = order_of_run(cfg, corpus)
    assert order.per_epoch == count
    assert (order.batch(0, count).targets != IGNORED).any(1).all()
    assert "model.block_size=256: 2 of the 4 conversations for train are too long: " in caplog.text
    with pytest.raises(ConfigError, match="block_size=16 leaves no answer of any of the 4 conversations for train"):
        order_of_run(*corpus_of(*words, "model.block_size=16"))


def test_a_model_answers_in_its_template_until_a_turn_ends(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    Path("talks.jsonl").write_text("\n".join([json.dumps({"messages": turns(*TALK)})] * 4))
    words = [*CHATML, "model=nano", "model.n_layer=1", "tracker=jsonl", "train.device=cpu", "train.max_iters=1"]
    words += ["hydra.run.dir=run", "train.sample_tokens=12", "train.eval_iters=1"]
    replies = [*b"42.", 256, *b"and so on"]
    asked: list[list[int]] = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        asked.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(torch.tensor([replies[(len(asked) - 1) % len(replies)]]), 257) * 1e9

    cfg = corpus_of()[0]
    with Trainer(compose(words)) as trainer:
        trainer.train()
        monkeypatch.setattr(language, "predictor", lambda model: logits)
        question = rendered([(USER, "6*7")])
        assert trainer.generate("6*7").endswith("6*7<|endoftext|>\n<|im_start|>assistant\n42.")
        assert asked[0] == [*question, *b"<|im_start|>assistant\n"]
        tokenizer = trainer.task.tokenizer  # type: ignore[attr-defined]

    def continued(tokens: torch.Tensor, on_tokens: Any, stop: list[int]) -> None:
        asked.append(tokens[0].tolist())
        for token in replies:
            on_tokens(torch.tensor([token]))
            if token in stop:
                return

    chat = Chat(continued, tokenizer, cfg.text)
    chat.answer("6*7")
    chat.answer("sure?")
    assert asked[-1] == [*rendered([(USER, "6*7"), (BOT, "42."), (USER, "sure?")]), *b"<|im_start|>assistant\n"]

    assert export.main(["run=run", "out=out"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs.apply_chat_template(turns(*TALK), return_dict=True)["input_ids"] == rendered(TALK)
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == [256]
