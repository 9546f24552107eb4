"""TF-IDF, what embeddings have to beat, through scikit-learn: pip install 'sublayer[baselines]'.

The n-gram baseline of language models is `sublayer.inspect.ngram`, of our own: no library at hand has Kneser–Ney.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError, UsageError
from .corpus import words_of


def tfidf_search(texts: Sequence[str], query: str, top: int = 10) -> list[tuple[int, float]]:
    """(number of the text, cosine) of those nearest to a query; texts that share no word with it are left out.

    Raises UsageError without scikit-learn, InputError for texts without any word.
    """
    vectorizer = _vectorizer()
    scores = (_fitted(vectorizer, texts) @ vectorizer.transform([query]).T).toarray()[:, 0]
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[:top]
    return [(i, float(scores[i])) for i in best if scores[i] > 0]


def tfidf_classify(texts: Sequence[str], labels: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """The label of each unknown text, by logistic regression on TF-IDF of the labelled ones.

    Raises UsageError without scikit-learn or for fewer than two labels, InputError for texts without any word.
    """
    if len(texts) != len(labels) or len(set(labels)) < 2:
        raise UsageError(f"{len(texts)} texts, {len(labels)} labels of {len(set(labels))} kinds: one a text, two kinds")
    vectorizer = _vectorizer()
    from sklearn.linear_model import LogisticRegression

    model: Any = LogisticRegression(C=10.0, max_iter=1000).fit(_fitted(vectorizer, texts), list(labels))
    return [str(label) for label in model.predict(vectorizer.transform(unknown))]


def _vectorizer() -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        raise UsageError("TF-IDF needs scikit-learn: pip install 'sublayer[baselines]'") from None
    made: Any = TfidfVectorizer
    return made(analyzer=words_of, sublinear_tf=True)


def _fitted(vectorizer: Any, texts: Sequence[str]) -> Any:
    try:
        return vectorizer.fit_transform(texts)
    except ValueError as error:
        raise InputError(f"TF-IDF of {len(texts)} texts: {error}") from None
