"""Reads plays as plain text: blocks between blank lines, each beginning with a line `NAME:`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.search import Found, one_of
from potluck.experiments.tasks.shakespeare import ALPHABET, WINDOW

LEAST: Final = 1000
"""Minimum number of characters in a role's blocks, with its name and line ends."""
STEP: Final = 10
"""Characters between the beginnings of two samples of a role."""
_TEST_SHARE: Final = 0.2
_SPLITS: Final = ("train", "test")


def shakespeare(folder: Path) -> Found:
    """Return the samples of the plays. Raises ConfigurationError."""
    path = one_of(folder, "shakespeare.txt", "input.txt")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"can't read {path}: {error}", path=path) from None
    return samples_by_role(text, source=str(path))


def samples_by_role(text: str, *, source: str) -> Found:
    """Return samples (`WINDOW` characters and the next one) by role, in order of first words.

    A role's words are those of all its blocks, joined by line ends. Samples begin at every
    `STEP`-th character. The last fifth of the words is for the test; no sample has characters of
    both parts.
    Raises ConfigurationError, with the line, if a block has no name or a character is unknown.
    """
    words = _words_by_role(text, source)
    if not words:
        raise ConfigurationError(
            f"{source}: no role speaks at least {LEAST} characters, the minimum for a sample; use "
            "the complete text"
        )
    found: dict[str, list[NDArray[np.uint8]]] = {
        f"{kind}_{split}": [] for split in _SPLITS for kind in "xyc"
    }
    for number, said in enumerate(words.values()):
        codes = np.array([ALPHABET.index(character) for character in said], dtype=np.uint8)
        cut = len(codes) - int(_TEST_SHARE * len(codes))
        for split, part in zip(_SPLITS, (codes[:cut], codes[cut:]), strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(part, WINDOW + 1)[::STEP]
            found[f"x_{split}"].append(windows[:, :-1])
            found[f"y_{split}"].append(windows[:, -1])
            found[f"c_{split}"].append(np.full(len(windows), number, dtype=np.uint8))
    arrays: Found = {key: np.concatenate(pieces) for key, pieces in found.items()}
    return {**arrays, "names": np.array(list(words))}


def _words_by_role(text: str, source: str) -> dict[str, str]:
    """Return the words of each role whose blocks have at least `LEAST` characters."""
    words: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    role = None
    for number, line in enumerate(text.split("\n"), start=1):
        unknown = set(line) - set(ALPHABET)
        if unknown:
            raise ConfigurationError(
                f"{source}, line {number}: the character {min(unknown)!r} is not one of the "
                f"{len(ALPHABET)} characters of the plays; remove the character"
            )
        if not line:
            role = None
            continue
        if role is None:
            if not line.endswith(":"):
                raise ConfigurationError(
                    f"{source}, line {number}: '{line[:40]}' is not a name with a colon; begin "
                    "each speech with a line such as 'HAMLET:'"
                )
            role = line[:-1]
        else:
            words.setdefault(role, []).append(line)
        sizes[role] += len(line) + 1
    return {role: "\n".join(lines) for role, lines in words.items() if sizes[role] >= LEAST}
