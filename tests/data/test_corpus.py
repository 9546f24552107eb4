"""The corpus that every machine has."""

import math

import pytest

from sublayer.data import corpus
from sublayer.errors import InputError


def test_the_standard_library_is_text_without_packages_and_tests() -> None:
    texts = corpus.standard_library(300_000)
    assert 300_000 <= sum(map(len, texts)) < 2_000_000
    assert texts == corpus.standard_library(300_000)
    assert any("import" in text for text in texts)


def test_every_twentieth_document_is_held_out() -> None:
    training, held = corpus.split([str(i) for i in range(45)])
    assert held == ["19", "39"]
    assert len(training) == 43


def test_unigram_bits() -> None:
    assert corpus.unigram_bits(["aabb"]) == pytest.approx(1)
    assert corpus.unigram_bits(["abcd", "éé"]) == pytest.approx(2 * 0.5 + 4 * (1 / 8) * math.log2(8) - 0.0)


def test_an_installation_without_sources_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="without its library sources"):
        corpus.standard_library()
