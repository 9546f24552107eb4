"""Tokenizers side by side: encoding against tiktoken and tokenizers, training against tokenizers.

The text is 68 MB of Python files that this machine has anyway: the standard library's, then the installed packages',
each different file once, in the order of their paths. The vocabulary has 32,768 ids, cut as GPT-2 does. Ids have to be
the same, or nothing is reported. tiktoken gets the pattern that it publishes for GPT-2, its fastest.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Options, Row, compared, peak_memory, progress, report, single, timings

VOCAB = 32_768
SIZE = 68_000_000
QUICK = {"size": 2_000_000, "vocab": 4_096}
SHARE = 8  # of the documents, one in so many goes to tokenizers, which takes its time


def main(options: Options) -> None:
    if options.threads:  # ours and tokenizers use the cores that they are given
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    cores = len(os.sched_getaffinity(0))
    os.environ |= {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"}  # before its first use
    size, vocab = (QUICK["size"], QUICK["vocab"]) if options.quick else (SIZE, VOCAB)
    texts = corpus(size)
    found = sum(len(text.encode()) for text in texts)
    progress(f"tokenizer: {len(texts):,} files, {found / 1e6:.1f} MB; a vocabulary of {vocab:,}; {cores} cores")
    rows = [*_training(texts, size, vocab, options.quick), *_encoding(texts, vocab, cores, options.quick)]
    report("tokenizer", rows, {"files": len(texts), "bytes": found, "vocab": vocab, "cores": cores})


def corpus(size: int) -> list[str]:
    """The text of distinct files, until they have `size` bytes or there are no more."""
    texts: dict[str, None] = {}
    left = size
    for path in _files():
        if left <= 0:
            break
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and text not in texts:
            texts[text] = None
            left -= len(text.encode())
    return list(texts)


def _files() -> Iterator[Path]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for folder in folders:
        others = [other for other in folders if other != folder]
        for path in sorted(folder.rglob("*.py")):
            if not any(other in path.parents for other in others if folder in other.parents):
                yield path


def train_ours(size: int, vocab: int) -> Callable[[], Any]:
    from sublayer.text import train_bpe

    return partial(train_bpe, corpus(size), vocab, end=None)


def train_theirs(size: int, vocab: int) -> Callable[[], Any]:
    return partial(_library, corpus(size), vocab)


def _library(texts: Sequence[str], vocab: int) -> Any:
    """A byte-level BPE by the tokenizers library, as its documentation trains one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _training(texts: Sequence[str], size: int, vocab: int, quick: bool) -> list[Row]:
    from sublayer.text import train_bpe

    progress("training")
    made: dict[str, Any] = {}
    seconds = timings(
        {
            "ours": lambda: made.update(ours=train_bpe(texts, vocab, end=None)),
            "theirs": lambda: made.update(theirs=_library(texts, vocab)),
        },
        rounds=1 if quick else 3,
        warm=0,
    )
    same = set(json.loads(made["ours"]._model.to_str())["model"]["vocab"]) & set(made["theirs"].get_vocab())
    progress("training: memory")
    rounds = 1 if quick else 3
    peaks = {
        who: [float(peak_memory(f"bench.tokenizer:train_{who}", size, vocab)) / 1e6 for _ in range(rounds)]
        for who in ("ours", "theirs")
    }
    return [
        compared("train", seconds["ours"], seconds["theirs"], "tokenizers", goal="≤ 1.1"),
        compared("train, peak memory", peaks["ours"], peaks["theirs"], "tokenizers", "MB", goal="≤ 1.1"),
        # A character that one of the two regex engines does not know yet is enough for a few other tokens.
        single("train, share of equal tokens", len(same) / vocab, 1.0, "all", "", goal="≥ 0.99"),
    ]


def _encoding(texts: list[str], vocab: int, cores: int, quick: bool) -> list[Row]:
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from sublayer.text import train_bpe

    ours = train_bpe(texts, vocab)
    ranks = {ours.token_bytes(id): id for id in range(vocab - 1)}
    specials = {"<|endoftext|>": vocab - 1}
    theirs = tiktoken.Encoding("peer", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=specials)
    some = texts[::SHARE]
    library = _reloaded(ours)

    progress("encoding: the same ids")
    batch = [ids.tolist() for ids in ours.encode_batch(texts)]
    if batch != theirs.encode_ordinary_batch(texts) or batch[::SHARE] != [
        encoding.ids for encoding in library.encode_batch_fast(some)
    ]:
        raise AssertionError("ids differ")
    if any(ours.encode(text) != ids for text, ids in zip(texts, batch, strict=True)):
        raise AssertionError("ids differ between one text and a batch")
    del batch

    rounds = 1 if quick else 5
    rows: list[Row] = []
    for name, peer, against, mine, other, files in (
        ("encode one by one", "tiktoken", 1.0, _each(ours.encode), _each(theirs.encode_ordinary), texts),
        (
            "encode a batch", "tiktoken", 1.0, ours.encode_batch,
            partial(theirs.encode_ordinary_batch, num_threads=cores), texts,
        ),
        ("encode one by one", "tokenizers", None, _each(ours.encode), _each(library.encode), some),
        ("encode a batch", "tokenizers", None, ours.encode_batch, library.encode_batch_fast, some),
    ):  # fmt: skip
        progress(f"{name}, against {peer}")
        calls = {"ours": partial(mine, files), "theirs": partial(other, files)}
        seconds = timings(calls, rounds if peer == "tiktoken" else min(rounds, 3))
        size = sum(len(text.encode()) for text in files) / 1e6
        speeds = {who: [size / taken for taken in series] for who, series in seconds.items()}
        rows.append(_faster(name, speeds["ours"], speeds["theirs"], peer, None if against is None else f"≥ {against}"))
    return rows


def _faster(name: str, ours: Sequence[float], peer: Sequence[float], peer_name: str, goal: str | None) -> Row:
    """A row in which more is better: the best of each."""
    row = compared(name, [1 / speed for speed in ours], [1 / speed for speed in peer], peer_name, "MB/s", goal)
    return Row(name, max(ours), max(peer), peer_name, 1 / row.ratio, 1 / row.high, 1 / row.low, "MB/s", goal)


def _each(encode: Callable[[str], Any]) -> Callable[[Sequence[str]], list[Any]]:
    return lambda texts: [encode(text) for text in texts]


def _reloaded(ours: Any) -> Any:
    """Ours as the tokenizers library reads it from our file, with special names as text."""
    import tempfile

    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        ours.save(folder)
        library = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    library.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    library.encode_special_tokens = True
    return library
