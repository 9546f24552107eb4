"""`sublayer words`: train vectors of words on text; neighbours, analogies, search."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import UsageError

Method = Literal["skipgram", "glove"]


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATHS…", help="Text (stdlib: too), or a folder of vectors.")],
    out: Annotated[Path | None, typer.Option(help="Train, and write the vectors into this folder.")] = None,
    method: Annotated[Method, typer.Option(help="Skip-gram with negative sampling, or GloVe.")] = "skipgram",
    dim: Annotated[int, typer.Option(help="Width of a vector.")] = 100,
    window: Annotated[int | None, typer.Option(help="Words to each side; 5, and 10 for glove.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Times over the text; 5, and 25 over the pairs of glove.")] = None,
    least: Annotated[int, typer.Option(help="Rarer words are left out.")] = 5,
    vocab: Annotated[int | None, typer.Option(help="Most words in all.")] = None,
    seed: Annotated[int, typer.Option(help="One seed, one result.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace vectors that are there.")] = False,
    near: Annotated[list[str] | None, typer.Option(help="Neighbours of a word, from a folder of vectors.")] = None,
    analogy: Annotated[str | None, typer.Option(help='"man king woman": man is to king as woman is to …')] = None,
    search: Annotated[str | None, typer.Option(help="The documents of PATHS nearest to a query, by TF-IDF.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="With --search: by the vectors of this folder too.")] = None,
    top: Annotated[int, typer.Option(help="How many are shown.")] = 10,
) -> None:
    """Train vectors of words on text, or look into trained ones: their neighbours, analogies and documents."""
    if top < 1:
        raise UsageError(f"--top {top}: at least 1")
    asked = [name for name, given in (("--out", out), ("--search", search), ("--near", near or analogy)) if given]
    if len(asked) != 1:
        raise UsageError("say one thing to do: --out FOLDER to train, --near or --analogy to look, --search to find")
    if search is not None:
        _search(paths, search, vectors, top)
    elif out is not None:
        _train(paths, out, method, dim, window, epochs, least, vocab, seed, overwrite)
    else:
        _look(paths, near or [], analogy, top)


def _train(
    paths: list[str], out: Path, method: Method, dim: int, window: int | None, epochs: int | None, least: int,
    vocab: int | None, seed: int, overwrite: bool,
) -> None:  # fmt: skip
    from ..data.readers import documents
    from ..words import Corpus, Glove, SkipGram, fit
    from ..words.vectors import FILE

    if (out / FILE).exists() and not overwrite:
        raise UsageError(f"--out {out}: there are vectors already; choose another folder, or --overwrite")
    begun = time.perf_counter()
    corpus = Corpus.read((document.text for document in documents(paths)), least, vocab)
    typer.echo(f"{len(corpus.ids):,} words, {len(corpus.words):,} distinct", err=True)
    if method == "skipgram":
        model, times = SkipGram(corpus, dim, window=window or 5, seed=seed), epochs or 5
    else:
        model, times = Glove(corpus, dim, window=window or 10, seed=seed), epochs or 25

    def tell(epoch: int, loss: float) -> None:
        typer.echo(f"epoch {epoch} of {times}: loss {loss:.4f}, {time.perf_counter() - begun:.1f} s", err=True)

    fit(model, times, out, tell)
    seconds = time.perf_counter() - begun
    typer.echo(f"{out}: {len(corpus.words):,} words, {dim} wide, {method}, in {seconds:.1f} s")


def _look(paths: list[str], near: list[str], analogy: str | None, top: int) -> None:
    from ..words import Vectors

    if len(paths) != 1:
        raise UsageError("--near and --analogy look into one folder of vectors")
    vectors = Vectors.load(paths[0])
    for word in near:
        _show(word, vectors.near(word, top))
    if analogy is not None:
        three = analogy.split()
        if len(three) != 3:
            raise UsageError(f'--analogy {analogy!r}: three words, as in "man king woman"')
        a, b, c = three
        _show(f"{a} : {b} = {c} : …", vectors.analogy(a, b, c, top))


def _search(paths: list[str], query: str, folder: Path | None, top: int) -> None:
    from ..data.readers import documents
    from ..words import Vectors
    from ..words.baselines import tfidf_search
    from ..words.vectors import search

    found = list(documents(paths))
    texts = [document.text for document in found]
    ways = {"TF-IDF": tfidf_search(texts, query, top)}
    if folder is not None:
        ways["vectors"] = search(Vectors.load(folder), texts, query, top)
    for name, best in ways.items():
        _show(f"{query} ({name})", [(found[number].source, value) for number, value in best])


def _show(title: str, found: list[tuple[str, float]]) -> None:
    typer.echo(title)
    for name, value in found:
        typer.echo(f"  {value:.3f}  {name}")
