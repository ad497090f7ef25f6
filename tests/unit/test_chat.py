"""A conversation on a terminal: turns, commands, and a KV cache that serves all of them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from wordrun import compose
from wordrun.commands.chat import HELP, Chat
from wordrun.data.options import TextConfig
from wordrun.data.tokenizers.char import ByteTokenizer
from wordrun.model.construction import build
from wordrun.model.generate import Cached, generate


class Terminal:
    """``wordrun generate`` on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.screen, theirs = pty.openpty()
        command = [sys.executable, "-m", "wordrun", "generate", *words]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)

    def until(self, text: str, timeout: float = 60) -> str:
        """Return what appears up to ``text``."""
        seen, end = "", time.monotonic() + timeout
        while not seen.endswith(text):
            assert time.monotonic() < end, seen
            try:
                byte = os.read(self.screen, 1)
            except OSError:  # Linux says so when the other side is closed
                byte = b""
            assert byte, f"it ended: {seen}"
            seen += byte.decode(errors="replace")
        return seen.replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def begin(*words: str) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield begin
    for each in made:
        each.process.kill()
        each.process.wait()
        os.close(each.screen)


def test_turns_and_commands(save_run: Any, terminal: Callable[..., Terminal]) -> None:
    save_run(Path("run"))
    chat = terminal("run=run", "length=5")
    assert HELP in chat.until("> ")
    assert len(HELP) < 80  # fits one line
    chat.type("fox\n")
    answer = chat.until("> ").removeprefix("fox\n")
    assert len(answer.removesuffix("\n> ")) == 5
    chat.type("é\n")
    assert "has characters that the vocabulary of 30 lacks" in chat.until("> ")
    for command, says in (("/reset", ""), ("/what", "Ctrl-D leaves"), ("/help", "Ctrl-D leaves")):
        chat.type(f"{command}\n")
        assert says in chat.until("> ")
    chat.type("fox\n")
    assert chat.until("> ").removeprefix("fox\n") == answer, "the same again after /reset"
    chat.type("\x04")
    assert chat.process.wait(30) == 0


def test_ctrl_c_ends_the_answer_and_not_the_conversation(save_run: Any, terminal: Callable[..., Terminal]) -> None:
    save_run(Path("run"))
    chat = terminal("run=run", "length=1000000", "slide=4")
    chat.until("> ")
    chat.type("fox\n")
    chat.until("fox\n".replace("\n", "\r\n"))
    os.read(chat.screen, 1)
    chat.process.send_signal(signal.SIGINT)
    chat.until("> ")
    chat.type("/exit\n")
    chat.until("/exit\r\n")
    assert chat.process.wait(30) == 0


def test_a_turn_computes_only_its_own_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose(["model.n_layer=1", "model.n_embd=16", "model.n_head=2", "model.block_size=256"]).model
    model, tokenizer = build(cfg, 257).eval(), ByteTokenizer()
    widths: list[int] = []
    model.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    data = TextConfig(kind="pairs", template="Q {prompt} A {answer}.\n")
    chat = Chat(partial(generate, Cached(model), length=10, block_size=256, top_k=1), tokenizer, data)
    chat.stop = []
    for text in ("one", "two"):
        chat.answer(text)
    assert widths == [len("\0Q one A ")] + 9 * [1] + [1 + len("Q two A ")] + 9 * [1]
    fresh = generate(
        lambda tokens: model(tokens, at=-1), torch.tensor([chat.tokens[:-10]]), 10, block_size=256, top_k=1
    )
    assert fresh[0].tolist() == chat.tokens


def test_an_answer_ends_where_the_template_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Or at the end-of-text token; neither is shown, and the next turn sees all of the template."""
    ends = iter([b"yes", b"no\x00"])

    def speak(tokens: torch.Tensor, on_tokens: Any, stop: list[int]) -> torch.Tensor:
        assert stop == [256, ord(";")]
        for byte in [*next(ends)[:3], stop[len(seen)]]:
            on_tokens(torch.tensor([byte]))
        seen.append(bytes(token % 256 for token in tokens[0].tolist()))
        return tokens

    seen: list[bytes] = []
    chat = Chat(speak, ByteTokenizer(), TextConfig(kind="pairs", template="<{prompt}>{answer};\n"))
    chat.answer("one")
    chat.answer("two")
    assert seen == [b"\0<one>", b"\0<one>yes\0<two>"]
    assert bytes(token % 256 for token in chat.tokens).endswith(b"<two>no\0;\n")
    assert capsys.readouterr().out == "yes\nno\0\n"
