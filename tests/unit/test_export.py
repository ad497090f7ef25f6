"""Exported folders: transformers loads them and computes the same logits, and a run can start from them."""

from __future__ import annotations

import base64
import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors import safe_open

from wordrun.checkpoint.load import find
from wordrun.commands.export import main
from wordrun.common import sigint
from wordrun.common.errors import UserError
from wordrun.data.prepare.sources.sample import sample_text
from wordrun.data.tokenizers.char import CharTokenizer
from wordrun.data.tokenizers.huggingface import letters, tokenizer_json
from wordrun.model.pretrained import open_weights
from wordrun.model.transformer import Transformer

SaveRun = Callable[..., Transformer]
TEXT = "Zwölf  Boxkämpfer \n\tjagen, 'Viktor' quer : über <unk> den großen 🦊 . \u0301\r\n"
MODELS = {
    "gpt without biases": (),
    "gpt": ("model.bias=true", "model.gelu=tanh"),
    "llama": ("model=llama_debug", "model.n_kv_head=1"),
    "experts of Qwen3": ("model=moe_debug", "model.qk_norm=true", "model.n_shared=0"),
    "experts of Mixtral": ("model=moe_debug", "model.n_shared=0"),
    "tied llama, larger vocabulary": ("model=llama_debug", "model.tie=true", "model.vocab_size=64"),
}


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shard_gb", [4, 4e-6], ids=["one file", "many files"])
def test_transformers_computes_the_same(words: tuple[str, ...], shard_gb: float, save_run: SaveRun) -> None:
    run, tokenizer = Path("run"), CharTokenizer(TEXT)
    ours = save_run(run, *words, text=TEXT)
    assert main([f"run={run}", "out=folder", f"shard_gb={shard_gb}"]) == 0
    assert (len(list(Path("folder").glob("*.safetensors"))) > 3) == (shard_gb < 1)

    theirs = transformers.AutoModelForCausalLM.from_pretrained("folder").eval()
    tokens = torch.from_numpy(tokenizer.encode(TEXT))[None, : ours.cfg.block_size]
    with torch.no_grad():
        expected = ours(tokens)
        assert expected.std() > 0.3
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    # No token ends the text.
    assert theirs.generate(tokens[:, :2], max_new_tokens=6, do_sample=True).shape == (1, 8)

    again = open_weights(Path("folder"), ours.cfg, tokenizer.vocab_size)
    state = {name: tensor for name, tensor in ours.state_dict().items() if not name.endswith("router.bias")}
    assert again.keys() == state.keys()
    assert all(again[name].equal(state[name]) for name in state)


def test_only_a_modern_model_with_the_parts_of_llama_is_exported(
    save_run: SaveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {
        "mlp": "swiglu",
        "norm_weights": "true",
        "embed_norm": "false",
        "softcap": "0.0",
        "value_layers": "[]",
        "ngram_rows": "[]",
    }
    parts = "mlp=relu2 norm_weights=false embed_norm=true softcap=15 value_layers=[0] ngram_rows=[9]"
    save_run(Path("modern"), "model=modern", *(f"model.{part}" for part in parts.split()), text=TEXT)
    assert main(["run=modern", "out=folder"]) == 1
    words = " ".join(f"model.{key}={value}" for key, value in plain.items())
    assert "with the parts of model=modern: export it with form=checkpoint; only a m" in (
        said := capsys.readouterr().err
    )
    assert f"only a model with {words} can be exported as a LLaMA or Qwen3\n" in said
    assert main(["run=modern", "out=folder", "form=checkpoint"]) == 0
    ours = save_run(Path("plain"), "model=modern", text=TEXT)  # the default
    assert main(["run=plain", "out=theirs"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    tokens = torch.from_numpy(CharTokenizer(TEXT).encode(TEXT))[None, : ours.cfg.block_size]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)


def test_ctrl_c_leaves_nothing_behind(save_run: SaveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(Path("run"))
    monkeypatch.setattr(
        "wordrun.commands.export.write_weights", lambda folder, *rest: signal.raise_signal(signal.SIGINT)
    )
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
    try:
        with sigint.ending_at_once():  # as wordrun's commands do while they start
            assert main(["run=run", "out=folder"]) == 130
    finally:
        signal.signal(signal.SIGINT, usual)
    assert [path.name for path in Path().iterdir()] == ["run"]


def test_the_tokenizer_is_the_same(save_run: SaveRun) -> None:
    save_run(Path("run"), text=TEXT)
    assert main(["run=run", "out=folder"]) == 0
    ours, theirs = CharTokenizer(TEXT), transformers.AutoTokenizer.from_pretrained("folder")
    tokens = theirs(TEXT).input_ids
    assert tokens == ours.encode(TEXT).tolist()
    assert theirs.decode(tokens) == TEXT
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 8
    with pytest.raises(Exception, match="UNK"):  # the library has no exception class for it
        theirs("a character that is not there: Ω")


def test_a_tokenizer_that_is_not_qwens_is_loaded_by_its_own_class(
    save_run: SaveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(Path("run"), "model=llama_debug", "model.qkv_bias=true", text=TEXT)
    assert main(["run=run", "out=folder"]) == 0
    assert "load the tokenizer with transformers.PreTrainedTokenizerFast: " in capsys.readouterr().err
    tokens = transformers.PreTrainedTokenizerFast.from_pretrained("folder")(TEXT).input_ids
    assert tokens == CharTokenizer(TEXT).encode(TEXT).tolist()


def test_a_checkpoint_goes_where_it_belongs(save_run: SaveRun, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (100, 200):
        save_run(Path("run"), step=step)
    (Path("run") / "huggingface" / ".step-00000100.new").mkdir(parents=True)  # left by a killed export
    assert main(["run=run", "checkpoint=100", "dtype=bf16"]) == 0
    folder = Path("run/huggingface/step-00000100").resolve()
    assert capsys.readouterr().out == f"{folder}\n"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-00000100"]
    assert {path.name for path in folder.iterdir()} == set(
        shlex.split("config.json model.safetensors tokenizer.json tokenizer_config.json")
    )
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert main(["run=run", "checkpoint=100"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{folder} already exists: remove it, or choose another folder with out=DIR\n")
    assert main(["run=run"]) == 0
    assert capsys.readouterr().out == f"{folder.with_name('step-00000200')}\n"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["run=nowhere"], 2, "nowhere is not a folder"),
        (["checkpoint=7"], 2, "has no checkpoint 7: available are latest and steps 100"),
        (["dtyp=fp32"], 2, "unknown option 'dtyp'; did you mean 'dtype'?"),
        (["dtype=auto", "shard_gb=0", "out=run"], 2, "dtype=auto should be one of fp32, float32, bf16, bfloat16, fp16"),
        (["dtype=auto", "shard_gb=0", "out=run"], 2, "\nshard_gb=0.0 should be a number above 0\n"),
        (["dtype=auto", "shard_gb=0", "out=run"], 2, "\nout=run already exists: remove it, or choose another fol"),
        (["out=file/folder"], 1, "cannot write "),
    ],
)
def test_mistakes_are_named(
    words: list[str], status: int, says: str, save_run: SaveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(Path("run"))
    Path("file").touch()
    before = sorted(Path().rglob("*"))
    assert main(["run=run", *words]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert sorted(Path().rglob("*")) == before


@pytest.fixture(scope="module")
def learned() -> Any:
    """A byte-level BPE tokenizer, as GPT-2's, of the tokenizers library."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([sample_text()[:50_000], TEXT], trainer)
    return fast


def loaded(tokenizer: dict[str, Any]) -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer))


def test_gpt2s_tokenizer_becomes_one_of_the_library(learned: Any) -> None:
    """Only its vocabulary is saved, in the order of the merges, from which they are recovered."""
    assert learned.get_vocab_size() == 600
    names = sorted(learned.get_vocab(), key=learned.token_to_id)
    table = tokenizers.decoders.ByteLevel()
    bytes_of = {letter: byte for byte, letter in enumerate(letters())}
    words = [bytes(bytes_of[letter] for letter in name) for name in names]
    assert [table.decode([name]) for name in names[250:]] == [word.decode(errors="replace") for word in words[250:]]
    ranks = " ".join(base64.b64encode(word).decode() for word in words)
    made, end = tokenizer_json({"kind": "gpt2", "ranks": ranks})
    assert end == 600
    text = sample_text()[50_000:60_000] + TEXT
    assert loaded(made).encode(text).ids == learned.encode(text).ids
    assert loaded(made).decode(learned.encode(text).ids) == text
    assert made["model"]["merges"] == json.loads(learned.to_str())["model"]["merges"]


def test_bytes_become_tokens_of_the_library() -> None:
    made, end = tokenizer_json({"kind": "byte"})
    assert end == 256
    assert loaded(made).encode(TEXT).ids == list(TEXT.encode())
    assert loaded(made).decode(list(TEXT.encode())) == TEXT


def test_tokenizers_of_the_library_are_exported_unchanged() -> None:
    assert tokenizer_json({"kind": "bpe", "eot": 0, "tokenizer": {"model": "m"}}) == ({"model": "m"}, 0)
    with pytest.raises(UserError, match="the kind words cannot be converted"):
        tokenizer_json({"kind": "words"})


def test_the_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "  out=null                Folder to create" in said
    assert max(map(len, said.splitlines())) <= 120


def test_exported_weights_are_a_checkpoint(save_run: SaveRun) -> None:
    ours = save_run(Path("run"), "model=llama_debug", text=TEXT)
    assert main(["run=run", "form=checkpoint", "out=weights"]) == 0
    saved = find(Path("weights"))
    state = dict(saved.weights())
    assert all(state[name].equal(p) for name, p in ours.named_parameters())
    assert state.keys() == dict(ours.named_parameters()).keys()
    assert json.loads(saved.tokenizer_json) == json.loads(find(Path("run")).tokenizer_json)
    assert main(["run=weights", "out=folder"]) == 0
