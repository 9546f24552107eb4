"""What the translation models are worth on the test pairs: BLEU, chrF, BLEU by length, and where they look.

    python runs/translation/judge.py [--test translation-data/test.jsonl] [--out translation-result] [FOLDER…]

FOLDERs are run folders, by default those of the three configurations beside this file. Writes into --out each model's
translations, result.json, result.md, bleu.png and attention.png. Needs sacrebleu: pip install 'sublayer[translation]'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from sublayer.cli.translate import telling
from sublayer.decoding import translate
from sublayer.decoding.slots import evaluating
from sublayer.inspect.trace import watching
from sublayer.nn.sublayer import ModelOp
from sublayer.text import Tokenizer, load_tokenizer
from sublayer.weights import load

try:
    from sacrebleu.metrics import BLEU, CHRF
except ImportError:
    sys.exit("judge.py: sacrebleu is not installed: pip install 'sublayer[translation]'")

FOLDERS = ("translation-transformer", "translation-gru", "translation-gru-attention")
EDGES = (0, 8, 13, 19, 28, 41, 10_000)  # words of a source, where one group of sentences ends and the next begins
BEAMS, PENALTY = 4, 0.6
SHOWN = 8, 16  # the fewest and most words of the sentence whose attention is drawn
GREY = "#7d8590"  # seen on white as on black
COLOURS = ("#3b82d6", "#e8833a", "#3f9d5c", "#a259c4")


class Trained(NamedTuple):
    """A model of a run."""

    name: str
    model: ModelOp
    tokenizer: Tokenizer
    facts: Mapping[str, Any]
    """The run's result.json."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[*map(Path, FOLDERS)])
    parser.add_argument("--test", type=Path, default=Path("translation-data/test.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("translation-result"))
    asked = parser.parse_args(arguments)
    pairs = [json.loads(line) for line in asked.test.read_text(encoding="utf-8").splitlines()]
    sources, targets = [pair["en"] for pair in pairs], [pair["de"] for pair in pairs]
    models = [opened(folder) for folder in asked.folders]
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for one in models:
        begun = time.monotonic()
        with telling(f"translating with {one.name}") as told:
            made = translate(one.model, one.tokenizer, sources, beams=BEAMS, length_penalty=PENALTY, progress=told)
        (asked.out / f"{one.name}.de").write_text("".join(f"{' '.join(x.split())}\n" for x in made), encoding="utf-8")
        found[one.name] = {**about(one), **scores(sources, targets, made), "decoding_seconds": time.monotonic() - begun}
    text = json.dumps({"sentences": len(pairs), "beams": BEAMS, "length_penalty": PENALTY, "models": found}, indent=1)
    (asked.out / "result.json").write_text(text + "\n", encoding="utf-8")
    (asked.out / "result.md").write_text(table(found), encoding="utf-8")
    print(table(found))
    draw_lengths(asked.out / "bleu.png", found)
    looking = [one for one in models if attentions(one, sources[0], targets[0])]
    if looking:
        draw_attention(asked.out / "attention.png", looking, *chosen(pairs))
    print(f"{asked.out}: translations, result.json, result.md, bleu.png, attention.png", file=sys.stderr)


def opened(folder: Path) -> Trained:
    facts = json.loads((folder / "result.json").read_text())
    name = folder.name.removeprefix("translation-")
    return Trained(name, load(folder / "model"), load_tokenizer(folder / "model"), facts)


def about(one: Trained) -> dict[str, Any]:
    return {
        "parameters": one.model.spec.parameters(),
        "steps": one.facts["step"],
        "seconds": one.facts["seconds"],
        "held_loss": one.facts["loss"],
    }


# --- scores ---


def scores(sources: Sequence[str], targets: Sequence[str], made: Sequence[str]) -> dict[str, Any]:
    """BLEU and chrF of all sentences with sacrebleu's signatures, and BLEU of those of like length."""
    bleu, chrf = BLEU(), CHRF()
    whole, letters = bleu.corpus_score(made, [targets]), chrf.corpus_score(made, [targets])
    groups: list[dict[str, Any]] = []
    for least, end in pairwise(EDGES):
        places = [i for i, source in enumerate(sources) if least <= len(source.split()) < end]
        if places:
            part = BLEU().corpus_score([made[i] for i in places], [[targets[i] for i in places]])
            words = sum(len(sources[i].split()) for i in places) / len(places)
            groups.append({"from": least, "below": end, "sentences": len(places), "words": words, "bleu": part.score})
    return {
        "bleu": whole.score,
        "bleu_signature": str(bleu.get_signature()),
        "brevity_penalty": whole.bp,
        "chrf": letters.score,
        "chrf_signature": str(chrf.get_signature()),
        "by_length": groups,
    }


def table(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    first = next(iter(found.values()))
    names = [_words(group) for group in first["by_length"]]
    lines = [
        "| model | parameters | steps | training | held-out loss | BLEU | chrF |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {one['parameters'] / 1e6:.2f}M | {one['steps']:,} | {one['seconds']:.0f} s "
            f"| {one['held_loss']:.3f} | {one['bleu']:.1f} | {one['chrf']:.1f} |"
            for name, one in found.items()
        ),
        "",
        _row("BLEU by words of the source", names),
        "|---" * (len(names) + 1) + "|",
        _row("sentences", [str(group["sentences"]) for group in first["by_length"]]),
        *(_row(name, [f"{group['bleu']:.1f}" for group in one["by_length"]]) for name, one in found.items()),
        "",
        f"`{first['bleu_signature']}`, `{first['chrf_signature']}`",
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _words(group: Mapping[str, Any]) -> str:
    return f"{group['from']}–{group['below'] - 1}" if group["below"] < EDGES[-1] else f"{group['from']} and more"


def draw_lengths(path: Path, found: Mapping[str, Any]) -> None:
    """BLEU over the length of the source, a line a model."""
    figure = Figure((7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for colour, (name, one) in zip(COLOURS, found.items(), strict=False):
        groups = one["by_length"]
        x, y = [group["words"] for group in groups], [group["bleu"] for group in groups]
        axes.plot(x, y, "o-", color=colour, linewidth=1.6, markersize=4, label=f"{name}, {one['bleu']:.1f} in all")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("words of the source", color=GREY)
    axes.set_ylabel("BLEU", color=GREY)
    axes.tick_params(colors=GREY, length=0)
    axes.grid(color=GREY, alpha=0.2)
    axes.legend(frameon=False, labelcolor=GREY)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, dpi=160, transparent=True)


# --- where they look ---


def chosen(pairs: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """The first sentence and its translation that are of a length to be drawn, and begin and end as a sentence does."""
    for pair in pairs:
        least, most = SHOWN
        if all(least <= len(text.split()) <= most for text in pair.values()) and pair["en"].endswith("."):
            return pair["en"], pair["de"]
    return pairs[0]["en"], pairs[0]["de"]


def attentions(one: Trained, source: str, target: str) -> dict[str, Tensor]:
    """How much each token of the reference looks at each of the source: {layer: [N, L, M]}; none without attention."""
    end = one.tokenizer.eos[0]
    read = torch.tensor([[*one.tokenizer.encode(source), end]])
    written = torch.tensor([[end, *one.tokenizer.encode(target)]])
    with evaluating(one.model), torch.no_grad(), watching(one.model) as seen:
        one.model(written, source=read)
    return {name: calls[0][0] for name, calls in seen.items() if name.endswith((".cross", ".mixer"))}


def draw_attention(path: Path, models: Sequence[Trained], source: str, target: str) -> None:
    """One panel for an alignment of one head; of more heads, the mean of the last layer's and the best aligned of all:
    that by which the tokens of the source are most looked at, each by some token of the target."""
    panels: list[tuple[str, Tensor, Tokenizer]] = []
    for one in models:
        layers = attentions(one, source, target)
        last = [*layers.values()][-1]
        if len(layers) == len(last) == 1:
            panels.append((f"{one.name}: its alignment", last[0], one.tokenizer))
            continue
        heads = [(name, number, head) for name, layer in layers.items() for number, head in enumerate(layer)]
        name, number, head = max(heads, key=lambda each: float(each[2].amax(0).mean()))
        block = name.split(".")[2]
        panels.append((f"{one.name}: last layer, mean over heads", last.mean(0), one.tokenizer))
        panels.append((f"{one.name}: the head that aligns best (layer {block}, head {number})", head, one.tokenizer))
    figure = Figure((5.2 * len(panels), 6.4), layout="constrained")
    for place, (title, weights, tokenizer) in enumerate(panels, 1):
        axes: Any = figure.add_subplot(1, len(panels), place)
        across, down = pieces(tokenizer, source), pieces(tokenizer, target)
        axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(across)), across, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(down)), down, fontsize=7, parse_math=False)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=130, facecolor="white")


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """What each token reads as, and the end; row i of a decoder's weights is about the i-th token to be written."""
    return [tokenizer.decode([token]).replace(" ", "·") for token in tokenizer.encode(text)] + ["end"]


if __name__ == "__main__":
    main()
