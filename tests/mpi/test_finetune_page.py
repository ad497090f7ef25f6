"""docs/finetune.md: the page's commands fine-tune a small model, and peft and transformers read what they export."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
import transformers

if TYPE_CHECKING:
    from conftest import Command

pytestmark = pytest.mark.forked_programs

PAGE = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
(TRAIN,) = re.findall(r"^launch .* data=pairs .*$", PAGE, re.MULTILINE)
EXPORTS = [line.partition("#")[0].strip() for line in re.findall(r"^wordrun export .*$", PAGE, re.MULTILINE)]
(PAIR,) = re.findall(r"```json\n(.*)\n```", PAGE)
END = "<|endoftext|>"
SMALL = [
    *shlex.split("""
    tracker=jsonl train.device=cpu train.dtype=fp32 train.max_iters=12 train.eval_interval=12
    model.batch_size=8 optimizer.warmup_iters=2 train.sample_tokens=0 train.save_best=false
    model.block_size=64 train.check_memory=false
"""),
    'data.template="Question: {prompt} Answer: {answer}"',
]
BASE = transformers.Qwen3Config(
    vocab_size=280,
    max_position_embeddings=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=40,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    """Write a base model with its tokenizer, and pairs like the page's."""
    pair = json.loads(PAIR)
    sums = ((a, b) for a in range(10) for b in range(10))
    changed = [{**pair, "prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in sums]
    assert pair in changed
    Path("pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(BASE).save_pretrained("base")
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([each["prompt"] for each in changed], trainer)
    fast.save("base/tokenizer.json")


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens).logits
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft uses what transformers deprecates
def test_the_pages_commands(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = command(*shlex.split(TRAIN.replace("launch -n 2 ", "")), *SMALL)
    assert wrong.returncode == 2
    named = re.search(r"use the options of these weights: (.*)", wrong.stderr)
    assert named, wrong.stderr
    words = [*shlex.split(TRAIN), *named[1].split(), *SMALL, "model.lora_rank=8", "optimizer.learning_rate=3e-2"]
    done = command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(Path("outputs/latest/metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] < 5.3  # ln 280 = 5.6
    for line in EXPORTS:
        done = command(*shlex.split(line))
        assert done.returncode == 0, done.stdout + done.stderr

    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    asked = [{"role": "user", "content": json.loads(PAIR)["prompt"]}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == f"{END}Question: What is 3 plus 4? Answer: "
    answered = [*asked, {"role": "assistant", "content": "7"}, *asked]
    turns = tokenizer.apply_chat_template(answered, tokenize=False).split(END)
    assert turns == ["", "Question: What is 3 plus 4? Answer: 7", "Question: What is 3 plus 4? Answer: "]
    tokens = tokenizer(turns[1], return_tensors="pt").input_ids
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    assert tuned.config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    assert not torch.allclose(logits(tuned, tokens), logits(base, tokens), atol=1e-2)
    # peft refuses the torchao that suits torch 2.8, which these adapters do not need.
    monkeypatch.setitem(sys.modules, "torchao", None)  # type: ignore[arg-type]
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'wordrun[dev]'")
    adapted = peft.PeftModel.from_pretrained(base, "adapter")
    torch.testing.assert_close(logits(adapted, tokens), logits(tuned, tokens), rtol=1e-5, atol=1e-5)
