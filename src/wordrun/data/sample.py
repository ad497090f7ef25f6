"""Play-like text from a small seeded generator: something to train on where there is no file and no network.

Speakers, phrases and rhyming line ends repeat with very unequal frequencies, as in a real text, so that a model
that learns spelling, words and the form of a scene falls far below the entropy of single characters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

LENGTH = 1_100_000

SPEAKERS = (
    "BELLAMY", "ROSAMUND", "OLD HARKER", "THE WARDEN", "ISOLDE", "TOBIAS", "FIRST SAILOR", "SECOND SAILOR",
    "QUEEN MARGERY", "CORIN", "A MESSENGER", "THE MILLER",
)  # fmt: skip
OPENINGS = (
    "I tell thee", "Good morrow", "What news", "Speak softly", "Hark now", "By my faith", "Alas", "Come hither",
    "Be still", "No more of this", "Remember well", "Look yonder",
)  # fmt: skip
SUBJECTS = (
    "the harbour", "my lord", "our northern wind", "the lantern", "thy brother", "this heavy crown", "the river",
    "a patient heart", "the winter", "the bell", "her silver thread", "the orchard", "that idle rumour", "the sea",
)  # fmt: skip
VERBS = (
    "keeps", "remembers", "hath broken", "will answer", "calls for", "doth carry", "forgives", "shall outlive",
    "never knew", "follows", "waits upon", "must betray",
)  # fmt: skip
OBJECTS = (
    "the morning", "an honest word", "the empty hall", "our fathers' debt", "the silent stone", "a traitor's gold",
    "the summer grain", "thy gentle hand", "the quiet shore", "my only child", "the candle's end", "every door",
)  # fmt: skip
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
    # Squared: early choices are far more frequent than late ones. random() alone is the same in every Python.
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
    """Return ``length`` characters of a play that nobody wrote, the same on every machine."""
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
