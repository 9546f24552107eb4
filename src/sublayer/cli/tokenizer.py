"""`sublayer tokenizer`: train one, encode and decode with it, and see what it makes of a text beside others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError, UsageError
from .main import HELP
from .progress import Line, size

if TYPE_CHECKING:
    from rich.table import Table

    from ..nn.sublayer import Model
    from ..text import Tokenizer
    from ..text.audit import Audit, Figures

Kind = Literal["bpe", "words", "characters"]
Pattern = Literal["gpt2", "cl100k", "o200k"]
BadBytes = Literal["error", "replace", "skip"]
Policy = Literal["text", "special", "error"]

TEXT = "Files, folders or globs: text, .jsonl, .parquet, also .gz and .zst; stdlib: is Python's own library."
Field = Annotated[str, typer.Option(help="Of JSON lines and Parquet: what holds the text.")]
Bad = Annotated[BadBytes, typer.Option(help="Bytes that are no text: an error, U+FFFD, or the document left out.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[str, typer.Argument(metavar="TOKENIZER", help="A tokenizer's folder or file, or: bytes.")]

SHOWN = 10  # rows of a table by kind of file

app = typer.Typer(name="tokenizer", add_completion=False, context_settings=HELP, no_args_is_help=True)


@app.callback()
def about() -> None:
    """Train a tokenizer, encode and decode with it, and see what it makes of a text beside others."""


@app.command()
def train(
    paths: Annotated[list[str], typer.Argument(metavar="PATHS…", help=TEXT)],
    out: Annotated[Path, typer.Option(help="The folder to write tokenizer.json into.")],
    vocab: Annotated[int, typer.Option(help="Ids in all: bytes, merges and the end of a text.")] = 32_000,
    kind: Annotated[Kind, typer.Option(help="Byte pairs; words or characters are for comparison.")] = "bpe",
    pattern: Annotated[Pattern, typer.Option(help="How text is cut; no token of a bpe crosses a cut.")] = "gpt2",
    end: Annotated[str, typer.Option(help='Name of the token that ends a text; "" for none.')] = "<|endoftext|>",
    field: Field = "text",
    bad_bytes: Bad = "error",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that is there.")] = False,
) -> None:
    """Learn a tokenizer from text; the same text gives the same one. Memory is bounded by the distinct words."""
    from ..data.readers import Seen, documents, measure
    from ..text import Characters, Words, train_bpe

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: a file, where a folder is needed")
    if (out / "tokenizer.json").exists() and not overwrite:
        raise UsageError(f"--out {out}: there is a tokenizer.json already; choose another folder, or --overwrite")
    begun, seen, whole = time.perf_counter(), Seen(), measure(paths).bytes
    texts = (document.text for document in documents(paths, field=field, bad_bytes=bad_bytes, seen=seen))
    with Line() as line:

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage == "count":
                line.stage("reading text", seen.bytes, whole, size)
            else:
                line.stage("merging pairs", done, total or 1)

        if kind == "bpe":
            made: Tokenizer = train_bpe(texts, vocab, pattern=pattern, end=end or None, progress=progress)
        elif kind == "words":
            made = Words.train(texts, vocab, end=end or None, progress=progress)
        else:
            made = Characters.train(texts, end=end or None, progress=progress)
    made.save(out)
    seconds = time.perf_counter() - begun
    typer.echo(f"{out}: {made.size:,} ids, from {_many(seen.documents, 'document')} ({size(whole)}) in {seconds:.1f} s")
    left = {"bad places in documents left out or replaced": seen.bad, "binary files passed over": seen.binary}
    for what, count in left.items():
        if count:
            typer.echo(f"{what}: {count:,}", err=True)
    typer.echo(f"next: sublayer tokenizer encode {out} 'some text', sublayer tokenizer audit {out} bytes", err=True)


@app.command()
def encode(
    tokenizer: Source,
    text: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]…", help="Texts; or --file, or stdin.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file that is one text; repeat for several.")] = None,
    specials: Annotated[
        Policy, typer.Option(help="A special token's name inside a text: its characters, that token, or an error.")
    ] = "text",
    framed: Annotated[bool, typer.Option("--framed", help="Put around it what its model expects there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a text: ids and their pieces.")] = False,
) -> None:
    """Print the ids of texts, a line a text."""
    made = _load(tokenizer)
    texts = [*(text or []), *map(_read, file or [])]
    if text is None and file is None:
        texts = [_decoded(sys.stdin.buffer.read(), "stdin")]
    for one in texts:
        ids = made.encode(one, framed=framed, specials=specials)
        typer.echo(json.dumps(_spelled(made, ids), ensure_ascii=False) if as_json else " ".join(map(str, ids)))


@app.command()
def decode(
    tokenizer: Source,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[IDS]…", help="As in 1 2 3 or 1,2,3; or stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a text: ids, pieces and text.")] = False,
) -> None:
    """Print the text of ids; on stdin, each line is a text."""
    made = _load(tokenizer)
    lines = [" ".join(ids)] if ids else _decoded(sys.stdin.buffer.read(), "stdin").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = [int(part) for part in line.replace(",", " ").split()]
        except ValueError:
            where = "" if ids else f"stdin, line {number}: "
            raise UsageError(f"{where}expected ids, numbers with spaces or commas between them, got {line!r}") from None
        text = made.decode(found)
        typer.echo(json.dumps(_spelled(made, found) | {"text": text}, ensure_ascii=False) if as_json else text)


@app.command()
def audit(
    tokenizers: Annotated[list[str], typer.Argument(metavar="TOKENIZER…", help="Folders or files, or: bytes.")],
    on: Annotated[list[str] | None, typer.Option(metavar="PATH", help=TEXT + " Repeat for several.")] = None,
    model: Annotated[
        str, typer.Option(help="What the tokens cost in: a published size (see `sublayer recipes`), or a folder.")
    ] = "llama3-8b",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the first tokenizer whose text is costed.")] = 8192,
    field: Field = "text",
    bad_bytes: Bad = "error",
    as_json: Json = False,
) -> None:
    """Compare tokenizers on a text: lengths, words that stay whole, what is lost, and what the length costs."""
    from ..data.readers import Seen, documents, measure
    from ..text.audit import audit

    spec = _model(model)
    made = dict(zip(_names(tokenizers), map(_load, tokenizers), strict=True))
    paths = on or ["stdlib:"]
    seen, whole = Seen(), measure(paths).bytes
    texts = ((each.text, each.source) for each in documents(paths, field=field, bad_bytes=bad_bytes, seen=seen))
    with Line() as line:
        found = audit(made, texts, lambda done: line.stage("encoding", seen.bytes, whole, size))
    costs = _costs(found, spec, context)
    if as_json:
        typer.echo(json.dumps(_as_json(found, costs, model, context), ensure_ascii=False))
    else:
        _print(found, costs, model)


def _load(name: str) -> Tokenizer:
    from ..text import Bytes, load_tokenizer

    if Path(name).exists():
        return load_tokenizer(name)
    if name == "bytes":
        return Bytes()
    from ..weights.hub import local  # and torch with it

    return load_tokenizer(local(name, weights=False))


def _names(sources: Sequence[str]) -> list[str]:
    """The last part of each path, or all of it where that is not enough."""
    if len(set(sources)) < len(sources):
        raise UsageError("a tokenizer is named twice")
    short = [Path(source).resolve().name for source in sources]
    return short if len(set(short)) == len(short) else list(sources)


def _model(name: str) -> Model:
    from ..recipes import model
    from ..weights.hub import HubName
    from ..weights.load import read_spec

    return read_spec(Path(name))[0] if Path(name).is_dir() or HubName.read(name) else model(name)


def _read(path: Path) -> str:
    return _decoded(path.read_bytes(), str(path))


def _decoded(data: bytes, source: str) -> str:
    """The text of a file, without the byte order mark at its start."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InputError(f"{source}: byte 0x{byte:02X} at offset {error.start:,} is not UTF-8") from None


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    """Pieces are bytes: those that are no whole character are written as \\xe2."""
    return {"ids": list(ids), "pieces": [tokenizer.token_bytes(id).decode("utf-8", "backslashreplace") for id in ids]}


def _costs(found: Audit, spec: Model, context: int) -> dict[str, dict[str, float]]:
    """What the model pays for the text that the first tokenizer makes `context` tokens of, by tokenizer."""
    from ..inspect.count import cost

    per_token = cost(spec).state_bytes_per_token
    first = next(iter(found.reports.values())).total.tokens
    costs = {}
    for name, report in found.reports.items():
        tokens = round(context * report.total.tokens / first)
        costs[name] = {
            "tokens": tokens,
            "attention_flops": _attention_flops(spec, tokens),
            "state_bytes": tokens * per_token,
        }
    return costs


def _attention_flops(spec: Model, tokens: int) -> int:
    """Operations of causal attention's two products in a forward pass over `tokens` (N): 4 · L · H · Q · N (N + 1) / 2.

    Each query and key that it sees: 2 Q for the score and 2 Q for the weighted value, for H heads of size Q in L
    layers; a window shortens what a query sees. Source: PaLM, arXiv 2204.02311, appendix B: 12 · L · H · Q · T a token,
    forward and backward, with no mask: a third of it, and half.
    """
    from ..nn.attention import AttendingOp

    flops = 0
    for module in spec.build(device="meta").modules():
        if isinstance(module, AttendingOp):
            full = tokens if module.reach is None else min(tokens, module.reach)
            seen = full * (full + 1) // 2 + (tokens - full) * full
            flops += 2 * module.pair * seen
    return flops


def _as_json(found: Audit, costs: dict[str, dict[str, float]], model: str, context: int) -> dict[str, Any]:
    def figures(one: Figures) -> dict[str, Any]:
        ratios = ("bytes_per_token", "tokens_per_word", "whole_share", "lost_share")
        return asdict(one) | {ratio: getattr(one, ratio) for ratio in ratios}

    return {
        "documents": found.documents,
        "bytes": found.bytes,
        "model": model,
        "context": context,
        "tokenizers": {
            name: {
                "size": report.size,
                "unused": report.unused,
                "changed_documents": report.changed,
                "refused_documents": report.refused,
                "total": figures(report.total),
                "scripts": {script: figures(one) for script, one in report.scripts.items()},
                "kinds": {kind: figures(one) for kind, one in report.kinds.items()},
                "cost": costs[name],
            }
            for name, report in found.reports.items()
        },
    }


def _print(found: Audit, costs: dict[str, dict[str, float]], model: str) -> None:
    from rich.console import Console

    from ..inspect.count import readable_bytes

    console = Console(highlight=False)
    reports = found.reports
    total = _table("", "ids", "unused", "bytes/token", "tokens/word", "whole words", "lost bytes")
    for name, report in reports.items():
        all_of_it = report.total
        total.add_row(
            name,
            f"{report.size:,}",
            f"{report.unused / report.size:.1%}",
            _ratio(all_of_it.bytes_per_token),
            _ratio(all_of_it.tokens_per_word),
            _share(all_of_it.whole_share),
            _share(all_of_it.lost_share) if report.changed else "none",
        )
    console.print(f"{_many(found.documents, 'document')}, {size(found.bytes)} of text", markup=False)
    console.print(total)
    for name, report in reports.items():
        if report.changed:
            refused = f", {report.refused:,} of them refused" if report.refused else ""
            line = f"{name}: {_many(report.changed, 'document')} of {found.documents:,} not given back{refused}"
            console.print(line, markup=False)

    first = next(iter(reports.values()))
    for title, rows in (("script", first.scripts), ("kind of file", first.kinds)):
        table = _table(f"bytes/token by {title}", "text", *reports)
        for row in list(rows)[:SHOWN] if title == "kind of file" else rows:
            parts = [(r.scripts if title == "script" else r.kinds)[row] for r in reports.values()]
            share = _share(rows[row].bytes / found.bytes)
            table.add_row(row or "(none)", share, *(_ratio(part.bytes_per_token) for part in parts))
        console.print()
        console.print(table)

    console.print()
    costly = _table(f"one text in {model}", "tokens", "attention", "", "KV cache", "")
    base = next(iter(costs.values()))
    for name, cost in costs.items():
        costly.add_row(
            name,
            f"{cost['tokens']:,.0f}",
            _flops(cost["attention_flops"]),
            _times(cost["attention_flops"], base["attention_flops"]),
            readable_bytes(cost["state_bytes"]),
            _times(cost["state_bytes"], base["state_bytes"]),
        )
    console.print(costly)
    console.print("attention, forward: 4 · layers · heads · head size · N (N + 1) / 2 for N tokens; cache in bfloat16")


def _table(first: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(Text(first))
    for column in columns:
        table.add_column(Text(column), justify="right")
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if value >= 0.0005 or not value else "<0.1%"


def _times(value: float, base: float) -> str:
    return f"{value / base:.2f}×" if base else "–"


def _flops(count: float) -> str:
    from ..inspect.count import readable

    text = readable(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
