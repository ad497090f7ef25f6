"""Synthetic play-like text from a small seeded generator, to train on without a file or a network.

Speakers, phrases and rhyming line ends repeat with very unequal frequencies, as in natural text, so a model that
learns spelling, words and the structure of a scene reaches a loss far below the entropy of single characters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

from wordrun.data.options import TextConfig
from wordrun.data.prepare.sources.base import Document, Source, WorkItem

LENGTH = 1_100_000

SPEAKERS = (
    "BELLAMY",
    "ROSAMUND",
    "OLD HARKER",
    "THE WARDEN",
    "ISOLDE",
    "TOBIAS",
    "FIRST SAILOR",
    "SECOND SAILOR",
    "QUEEN MARGERY",
    "CORIN",
    "A MESSENGER",
    "THE MILLER",
)
OPENINGS = (
    "I tell thee",
    "Good morrow",
    "What news",
    "Speak softly",
    "Hark now",
    "By my faith",
    "Alas",
    "Come hither",
    "Be still",
    "No more of this",
    "Remember well",
    "Look yonder",
)
SUBJECTS = (
    "the harbour",
    "my lord",
    "our northern wind",
    "the lantern",
    "thy brother",
    "this heavy crown",
    "the river",
    "a patient heart",
    "the winter",
    "the bell",
    "her silver thread",
    "the orchard",
    "that idle rumour",
    "the sea",
)
VERBS = (
    "keeps",
    "remembers",
    "hath broken",
    "will answer",
    "calls for",
    "doth carry",
    "forgives",
    "shall outlive",
    "never knew",
    "follows",
    "waits upon",
    "must betray",
)
OBJECTS = (
    "the morning",
    "an honest word",
    "the empty hall",
    "our fathers' debt",
    "the silent stone",
    "a traitor's gold",
    "the summer grain",
    "thy gentle hand",
    "the quiet shore",
    "my only child",
    "the candle's end",
    "every door",
)
ENDINGS = (
    ("by night", "in light", "out of sight", "with all my might"),
    ("at sea", "for thee", "and me", "till we be free"),
    ("again", "in the rain", "and all in vain", "with little pain"),
    ("to stay", "this day", "far away", "as you say"),
    ("alone", "to the bone", "on the throne", "like a stone"),
)
STAGE = ("Enter", "Exit", "Re-enter", "Aside to")
PUNCTUATION = (",", ";", ".", ".", "!", "?")


def _pick(choices: Sequence[str], rng: random.Random) -> str:
    # Squaring favors early choices. Of the random module, only random() gives the same numbers in every Python.
    return choices[int(rng.random() ** 2 * len(choices))]


def _speech(rng: random.Random) -> str:
    lines = []
    rhyme = ENDINGS[int(rng.random() * len(ENDINGS))]
    for number in range(1 + int(rng.random() * 5)):
        words = f"{_pick(SUBJECTS, rng)} {_pick(VERBS, rng)} {_pick(OBJECTS, rng)}"
        if number == 0 and rng.random() < 0.5:
            words = f"{_pick(OPENINGS, rng)}, {words}"
        if rng.random() < 0.7:
            words = f"{words} {_pick(rhyme, rng)}"
        lines.append(words[0].upper() + words[1:] + PUNCTUATION[int(rng.random() * len(PUNCTUATION))])
    return "\n".join(lines)


@cache
def sample_text(length: int = LENGTH, seed: int = 2024) -> str:
    """Return ``length`` characters of synthetic play-like text, the same on every machine."""
    rng = random.Random(seed)
    parts: list[str] = []
    written, scene = 0, 0
    while written < length:
        if rng.random() < 0.02 or scene == 0:
            scene += 1
            part = f"SCENE {scene}. Before {_pick(SUBJECTS, rng)}.\n\n"
        elif rng.random() < 0.08:
            part = f"[{_pick(STAGE, rng)} {_pick(SPEAKERS, rng)}]\n\n"
        else:
            part = f"{_pick(SPEAKERS, rng)}:\n{_speech(rng)}\n\n"
        parts.append(part)
        written += len(part)
    return "".join(parts)[:length]


class SampleSource(Source):
    """The built-in sample text."""

    @classmethod
    def locate(cls, data: TextConfig) -> SampleSource:
        """Return the sample, which needs no file."""
        return cls(data, None, "embedded sample: synthetic play-like text")

    def size(self) -> int:
        """Return 0: nothing is read."""
        return 0

    def items(self) -> list[WorkItem]:
        """Return one work item."""
        return [WorkItem(0, "text", size=LENGTH)]

    def documents(self, item: WorkItem) -> Iterator[Document]:
        """Yield the text."""
        yield Document(sample_text())

    def single_text(self) -> WorkItem:
        """Return the only work item."""
        return self.items()[0]
