"""What came of a training run, as one HTML page that needs nothing else: numbers, pictures, samples, sizes."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..files import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from ..text.tokenizer import Tokenizer
    from .profile import Profile

Facts = Mapping[str, str]
"""Name → value, in the order in which they are shown."""
BLUE = (59, 120, 231)  # is seen on white as on black
GREY = "#78828c"


@dataclass(frozen=True)
class Sample:
    """What the model wrote at one time."""

    title: str
    """Such as "step 200, 2.31 bits per byte"."""
    prompt: str
    text: str
    """What it wrote after the prompt."""


@dataclass(frozen=True)
class Attention:
    """How the model read one text."""

    tokens: Sequence[str]
    """[L]: the text of each token; `token_texts` gives it."""
    layers: Mapping[str, Tensor]
    """{layer: [N, L, L]}, as `sublayer.inspect.trace.attention` gives it."""


@dataclass(frozen=True)
class Report:
    """All that a page shows; what is left empty is left out. Texts are shown as they are, never as HTML."""

    title: str
    summary: str
    """One or two sentences under the title."""
    facts: Facts = field(default_factory=dict)
    """The figures at the top: few, and short."""
    bits: Mapping[str, float] = field(default_factory=dict)
    """Who → bits per byte of the held-out text; the first is the model."""
    bits_note: str = ""
    loss: bytes | None = None
    """The learning curve, a PNG."""
    samples: Sequence[Sample] = ()
    tokenizer: Facts = field(default_factory=dict)
    lines: Sequence[Sequence[str]] = ()
    """Texts as their tokens."""
    attention: Attention | None = None
    profile: Profile | None = None
    machine: str = ""
    """Where the profile was taken, and on what batch."""
    caches: Mapping[str, int] = field(default_factory=dict)
    """Model → bytes of its key/value cache."""
    caches_note: str = ""
    tree: str = ""
    """The architecture, as `spec.tree()` prints it."""
    command: str = ""
    """What to type to get the same."""
    versions: Facts = field(default_factory=dict)
    """Seed, versions, machine."""


def write_report(path: Path | str, report: Report) -> list[Path]:
    """Writes the page, and its pictures beside it as PNGs; returns the paths of all, the page first.

    The page is one file that asks for nothing from elsewhere. It is whole without scripts too: they only show what the
    token that is pointed at attends to. Raises InputError for attention whose shapes are not those of its tokens.
    """
    path = Path(path)
    page = render(report)
    pictures: dict[str, bytes] = {}
    if report.bits:
        pictures["bits.png"] = _draw_bits(report.bits)
    if report.loss is not None:
        pictures["loss.png"] = report.loss
    if report.attention is not None:
        pictures["attention.png"] = _draw_attention(report.attention)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, data in pictures.items():
        with replacing(path.with_name(name)) as beside:
            beside.write_bytes(data)
    with replacing(path) as beside:
        beside.write_bytes(page.encode("utf-8", "replace"))
    return [path, *(path.with_name(name) for name in pictures)]


def render(report: Report) -> str:
    """The page as HTML. Raises InputError as `write_report`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "png": _png_uri, "seen": visible, "label": label}
    heads = _heads(report.attention) if report.attention is not None else []
    return environment.get_template("report.html.jinja").render(report=report, heads=heads, sharpest=_sharpest(heads))


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each id reads as: bytes that are no whole character as "\\xe2", special tokens as "⟨7⟩"."""
    texts = [tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids]
    return [text or f"⟨{token}⟩" for text, token in zip(texts, ids, strict=True)]


def size(count: float) -> str:
    """343597383680 → "343.6 GB": decimal units, as memory is sold and papers count."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} bytes"


def visible(text: str) -> str:
    """Text in which line ends, tabs and other characters without a picture are seen."""
    marks = {"\n": "⏎", "\t": "⇥"}
    return "".join(marks.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text)


def label(token: str) -> str:
    """A token beside an axis: short, and its spaces are seen."""
    text = visible(token).replace(" ", "·")
    return text if len(text) <= 12 else f"{text[:11]}…"


@dataclass(frozen=True)
class _Head:
    """One picture of attention."""

    title: str
    weights: NDArray[np.uint8]  # [L, L], 255 is 1
    sharpness: float

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.weights.tobytes()).decode()

    @property
    def png(self) -> bytes:
        """One pixel a weight, blue that lets through the less the larger the weight: for dark and light pages."""
        from PIL import Image

        picture = Image.fromarray(self.weights, "P")
        picture.putpalette(BLUE * 256)
        file = io.BytesIO()
        # Weights are small where there are many keys: the root makes 4% a fifth of the way to full blue.
        picture.save(file, "PNG", optimize=True, transparency=bytes(int((255 * i) ** 0.5) for i in range(256)))
        return file.getvalue()


def _heads(attention: Attention) -> list[tuple[str, list[_Head]]]:
    """[(layer, its heads)]."""
    length = len(attention.tokens)
    layers: list[tuple[str, list[_Head]]] = []
    for name, weights in attention.layers.items():
        if weights.dim() != 3 or tuple(weights.shape[1:]) != (length, length):
            raise InputError(
                f"{name}: attention over {length} tokens is [N, {length}, {length}], got {list(weights.shape)}"
            )
        layer = re.sub(r"^(?:decoder\.)?(.*?)blocks\.(\d+)\.(?:attn)?", r"\1layer \2 ", name).replace(".", " ").strip()
        values = weights.detach().float().cpu().numpy()
        # How much an average token takes from the one that it takes most from, itself and the first one left aside.
        elsewhere = values * (1 - np.eye(length, dtype=np.float32))
        elsewhere[:, :, :1] = 0
        heads = [
            _Head(f"{layer}, head {i}", np.rint(255 * one).astype(np.uint8), float(far.max(-1).mean()) if length else 0)
            for i, (one, far) in enumerate(zip(values, elsewhere, strict=True))
        ]
        layers.append((layer, heads))
    return layers


def _sharpest(layers: list[tuple[str, list[_Head]]]) -> int:
    """The number, counted through all layers, of the head that is shown large at first."""
    heads = [head for _, row in layers for head in row]
    return max(range(len(heads)), key=lambda i: heads[i].sharpness, default=0)


def _png_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _figure(width: float, height: float) -> Any:
    """A figure whose lines and letters are seen on white as on black."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _saved(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
        figure.savefig(file, format="png", dpi=150, transparent=True)
    return file.getvalue()


def _draw_bits(bits: Mapping[str, float]) -> bytes:
    """Bars, the model's own in blue."""
    figure = _figure(7, 0.6 + 0.42 * len(bits))
    axes = figure.add_subplot()
    colours = [tuple(part / 255 for part in BLUE), *["#a0a8b0"] * (len(bits) - 1)]
    bars = axes.barh(range(len(bits)), list(bits.values()), color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.3f}" for value in bits.values()], padding=5, color=GREY)
    axes.set_yticks(range(len(bits)), list(bits), color=GREY, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte of held-out text: less is better", color=GREY)
    axes.margins(x=0.1)
    axes.tick_params(colors=GREY, length=0)
    axes.spines[:].set_visible(False)
    return _saved(figure)


def _draw_attention(attention: Attention) -> bytes:
    """All heads of all layers, small; and the sharpest one with its tokens."""
    layers = _heads(attention)
    most = max(len(heads) for _, heads in layers)
    length = len(attention.tokens)
    step = length + max(1, length // 12)
    mosaic = np.full((step * len(layers), step * most), np.nan)
    for i, (_, heads) in enumerate(layers):
        for j, head in enumerate(heads):
            mosaic[i * step : i * step + length, j * step : j * step + length] = head.weights
    high, side = 0.9 * len(layers), max(4.0, 0.17 * length)
    figure = _figure(max(7.0, 0.9 * most, side + 1.5), high + side + 1)
    small, large = figure.subfigures(2, 1, height_ratios=[high + 0.3, side + 0.7])
    axes = _drawn(small.subplots(), mosaic)
    axes.set_yticks(
        [i * step + length / 2 for i in range(len(layers))], [layer for layer, _ in layers], parse_math=False
    )
    axes.set_xticks([j * step + length / 2 for j in range(most)], [f"head {j}" for j in range(most)])
    axes.tick_params(labelsize=8, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    head = [head for _, heads in layers for head in heads][_sharpest(layers)]
    axes = _drawn(large.subplots(), head.weights)
    labels = [label(token) for token in attention.tokens]
    axes.set_xticks(range(length), labels, rotation=90, parse_math=False, family="monospace")
    axes.set_yticks(range(length), labels, parse_math=False, family="monospace")
    axes.tick_params(labelsize=7)
    axes.set_title(f"{head.title}: each row is a token, and what it reads", color=GREY, fontsize=9, parse_math=False)
    return _saved(figure)


def _drawn(axes: Any, weights: Any) -> Any:
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=255, interpolation="nearest")
    axes.tick_params(length=0, colors=GREY)
    axes.spines[:].set_color(GREY)
    return axes
