"""Time and memory of what mixes positions, by length: a training pass, and a decoded token after a prompt that long.

One mixer alone in a model of width 256 without tokens or head, batch 1, fp32; about 4 · 256² parameters each, as
attention has. The three parts of a measurement are a forward pass that keeps what backward needs, the backward pass,
and a token decoded with a state. Growth is a straight line through logarithms, fitted to the four longest lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bench import harness
from bench.harness import Options, Row, clock, compared, exponent, peaks, progress, report, timings
from sublayer.nn.additive import Additive
from sublayer.nn.attention import Attention
from sublayer.nn.delta import GatedDelta
from sublayer.nn.gated_convolution import GatedConvolution
from sublayer.nn.latent import LatentAttention
from sublayer.nn.linear_attention import LinearAttention
from sublayer.nn.mamba import Mamba, Mamba2
from sublayer.nn.op import Context, Part
from sublayer.nn.projection import Projection
from sublayer.nn.recurrent import Recurrent
from sublayer.nn.s4 import S4
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Step

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
USUAL, FITTED = 4, 4  # lengths without --full; lengths that growth is fitted to
DIM, HEADS, WINDOW = 256, 4, 256
TOKENS = 16  # decoded in one measurement
PARTS = ("forward", "backward", "decoded token")
PASSES = ("forward without gradients", "forward and backward")  # whose memory is measured

# Hidden sizes are those at which recurrent layers, with a projection back to D, have 4 D² parameters.
MIXERS: dict[str, Part] = {
    "attention": Attention(HEADS),
    f"attention, window {WINDOW}": Attention(HEADS, window=WINDOW),
    "latent attention": LatentAttention(HEADS, latent=128, content_size=64, rotary_size=32, value_size=64),
    "additive in a GRU": Additive(hidden=104, bridge=False),
    "Elman": Recurrent("elman", hidden=320),
    "LSTM": Recurrent("lstm", hidden=144),
    "GRU": Recurrent("gru", hidden=176),
    "gated convolution": GatedConvolution(kernel=2),
    "linear attention": LinearAttention(HEADS),
    "gated delta": GatedDelta(key_heads=HEADS // 2, value_heads=HEADS, key_size=64, value_size=64),
    "S4": S4(),
    "S4D": S4(structure="diagonal"),
    "Mamba": Mamba(inner=320),
    "Mamba-2": Mamba2(heads=5, head_size=64, state_size=64),
}
ATTENTION = "attention"
NOTHING = "nothing"  # a model without a mixer: what a call costs by itself
GOALS = {1024: 3.0, 4096: None, 8192: 1.0}  # the most that a scan's time should be of attention's
SCANS = ("linear attention", "gated delta", "S4", "S4D", "Mamba", "Mamba-2")
UNTIL = {"additive in a GRU": 2048}  # it keeps L · M · 104 numbers for its backward pass: 7 GB at 4096

Series = dict[str, dict[int, list[float]]]  # seconds of each round, by mixer and length
Sizes = Mapping[int, float]  # by length


def main(options: Options) -> None:
    lengths = LENGTHS if options.full else LENGTHS[: 2 if options.quick else USUAL]
    seconds: dict[str, Series] = {part: {} for part in PARTS}
    for length in lengths:
        progress(f"time at {length}")
        rounds = 1 if options.quick else 5 if length <= 2048 else 3
        for part, found in (_training(length, rounds) | {"decoded token": _decoding(length, rounds)}).items():
            for name, spent in found.items():
                seconds[part].setdefault(name, {})[length] = spent
    passes = {name: _sums(seconds, name) for name in MIXERS}
    taken = {name: _peaks(name, lengths[-FITTED:]) for name in MIXERS}
    bytes_taken = {kind: {name: found[i] for name, found in taken.items()} for i, kind in enumerate(PASSES)}
    report("mixers", _rows(passes), {"parameters": _parameters(), "seconds": seconds, "bytes": bytes_taken})
    tables = _tables(seconds, passes, bytes_taken, lengths)
    print(tables)
    (harness.RESULTS / "mixers.md").write_text(tables, encoding="utf-8")
    draw(harness.RESULTS / "mixers.png", passes, bytes_taken[PASSES[1]], seconds["decoded token"])


# --- what is measured ---


class Vectors(Part):
    """A front end for what are vectors already."""

    def build(self, dim: int, context: Context) -> nn.Module:
        return _VectorsOp()


class _VectorsOp(nn.Module):
    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Step]:
        return x, step


class Back(Part):
    """A linear map from `width` to D."""

    width: int

    def build(self, dim: int, context: Context) -> nn.Module:
        return _BackOp(self.width, dim, bias=False)


class _BackOp(Projection):
    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        return super().forward(x)


def model(name: str) -> ModelOp:
    """The mixer alone: y = mixer(x), without a residual or a norm."""
    if name == NOTHING:
        return Model(DIM, decoder=Trunk(Vectors(), ()), head=None).build()
    op = MIXERS[name]
    post = Back(cast(int, op.hidden)) if isinstance(op, Recurrent | Additive) else None
    block = Block((Sublayer("mixer", op, post=post, skip=0.0),))
    return Model(DIM, decoder=Trunk(Vectors(), (block,)), head=None).build()


def training(name: str, length: int) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """(forward, backward), whose turn it is by turns; backward takes what forward gave."""
    mixer = model(name)
    x, weight = (torch.randn(1, length, DIM, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    inputs = [x.requires_grad_(), *mixer.parameters()]
    step = Step(memory=x.detach()) if _reads_memory(name) else Step()

    def forward() -> Tensor:
        return mixer(x, step)

    def backward(y: Tensor) -> None:
        torch.autograd.grad(y, inputs, weight)

    return forward, backward


def decoding(name: str, length: int, tokens: int) -> Callable[[], None]:
    """TOKENS tokens, one after the other, after a prompt of `length`; it may be called for `tokens` in all."""
    mixer = model(name).eval()
    x = torch.randn(1, length, DIM, generator=torch.Generator().manual_seed(0))
    memory = length if _reads_memory(name) else 0
    state = State.allocate(mixer, 1, length + tokens, memory)
    with torch.no_grad():
        mixer(x, Step(memory=x) if memory else Step(), state)

    @torch.no_grad()
    def run() -> None:
        for i in range(TOKENS):
            mixer(x[:, i : i + 1], Step(), state)

    return run


def _reads_memory(name: str) -> bool:
    return name in MIXERS and isinstance(MIXERS[name], Additive)


def memory(name: str, lengths: Sequence[int]) -> Iterator[Callable[[], None]]:
    """At each length a forward pass without gradients, then a forward and a backward pass.

    Once what only a first call takes is taken.
    """
    for length in lengths:
        forward, backward = training(name, length)

        def answer(forward: Callable[[], Tensor] = forward) -> None:
            with torch.no_grad():
                forward()

        def whole(forward: Callable[[], Tensor] = forward, backward: Callable[[Tensor], None] = backward) -> None:
            backward(forward())

        whole()
        yield from (answer, whole)


def _measured(length: int) -> list[str]:
    return [name for name in MIXERS if length <= UNTIL.get(name, length)]


def _training(length: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Mixers take turns; each turn is a forward pass and the backward pass of it."""
    halves: dict[str, dict[str, list[float]]] = {part: {} for part in PARTS[:2]}

    def turn(name: str, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
        start = clock()
        y = forward()
        between = clock()
        backward(y)
        for part, spent in zip(PARTS, (between - start, clock() - between), strict=False):
            halves[part].setdefault(name, []).append(spent)

    runs = {name: training(name, length) for name in _measured(length)}
    warm = 1 if length <= 1024 else 0
    timings({name: lambda name=name: turn(name, *runs[name]) for name in runs}, rounds, warm)
    return {part: {name: spent[warm:] for name, spent in found.items()} for part, found in halves.items()}


def _decoding(length: int, rounds: int) -> dict[str, list[float]]:
    names = [NOTHING, *_measured(length)]
    found = timings({name: decoding(name, length, (rounds + 1) * TOKENS) for name in names}, rounds)
    return {name: [each / TOKENS for each in spent] for name, spent in found.items()}


def _peaks(name: str, lengths: Sequence[int]) -> list[dict[int, int]]:
    """Bytes by length: without gradients, and forward and backward."""
    progress(f"memory of {name}")
    lengths = [length for length in lengths if name in _measured(length)]
    found = peaks("bench.mixers:memory", name, lengths)
    return [dict(zip(lengths, found[kind :: len(PASSES)], strict=True)) for kind in range(len(PASSES))]


def _state(name: str, length: int) -> int:
    """Bytes that a prompt leaves behind, its positions and segments apart."""
    memory = length if _reads_memory(name) else 0
    states = (State.allocate(model(each), 1, length, memory, device="meta") for each in (name, NOTHING))
    mine, none = (state.bytes() for state in states)
    return mine - none


def _parameters() -> dict[str, int]:
    return {name: sum(parameter.numel() for parameter in model(name).parameters()) for name in MIXERS}


# --- what it says ---


def _sums(seconds: Mapping[str, Series], name: str) -> dict[int, list[float]]:
    """Forward and backward together, by length."""
    first, second = (seconds[part][name] for part in PARTS[:2])
    return {length: [a + b for a, b in zip(first[length], second[length], strict=True)] for length in first}


def _rows(passes: Series) -> list[Row]:
    """A training pass beside attention's. The scans should be within 3 times at 1024, and faster beyond 4096."""
    rows: list[Row] = []
    for length in set(GOALS) & set(passes[ATTENTION]) or passes[ATTENTION]:
        for name, found in passes.items():
            if name != ATTENTION and length in found:
                row = compared(f"{length}: {name}", found[length], passes[ATTENTION][length], ATTENTION)
                most = GOALS.get(length) if name in SCANS else None
                rows.append(row if most is None else replace(row, goal=_verdict(row.ratio, most)))
    return rows


def _verdict(ratio: float, most: float) -> str:
    return f"≤ {most:g}: {'met' if ratio <= most else 'missed'}"


def _tables(
    seconds: Mapping[str, Series], passes: Series, taken: Mapping[str, Mapping[str, Sizes]], lengths: Sequence[int]
) -> str:
    """Markdown: the best times of the rounds, peaks of memory, what a prompt leaves."""
    tables = [_table(f"milliseconds, {part}", _best(seconds[part], 1e3)) for part in PARTS]
    tables.insert(2, _table("milliseconds, forward and backward", _best(passes, 1e3)))
    tables += [_table(f"peak MiB, {title}", _over(found, 2**20)) for title, found in taken.items()]
    state = {name: {x: _state(name, x) / 2**10 for x in lengths if name in _measured(x)} for name in MIXERS}
    parameters = {name: f"{count:,}" for name, count in _parameters().items()}
    return "\n".join([*tables, _table("KiB of state after a prompt", state, parameters, "parameters")])


def _best(found: Series, factor: float) -> dict[str, dict[int, float]]:
    return {name: {x: factor * min(spent) for x, spent in by_length.items()} for name, by_length in found.items()}


def _over(found: Mapping[str, Sizes], unit: float) -> dict[str, dict[int, float]]:
    return {name: {x: size / unit for x, size in by_length.items()} for name, by_length in found.items()}


def _table(
    title: str, found: Mapping[str, Sizes], last: Mapping[str, str] | None = None, last_title: str = "exponent"
) -> str:
    lengths = sorted({length for by_length in found.values() for length in by_length})
    lines = [[title, *(f"{length:,}" for length in lengths), last_title], ["---"] * (len(lengths) + 2)]
    for name, by_length in found.items():
        cells = [_figure(by_length[x]) if x in by_length else "" for x in lengths]
        lines.append([name, *cells, _growth(by_length) if last is None else last[name]])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _growth(by_length: Sizes) -> str:
    """The fitted exponent; none where a peak was too small to be seen in resident memory."""
    longest = sorted(by_length)[-FITTED:]
    values = [by_length[length] for length in longest]
    return f"{exponent(longest, values):.2f}" if min(values) > 0 else ""


def draw(path: Path, passes: Series, taken: Mapping[str, Sizes], decoded: Series) -> None:
    """Three panels by length, both axes logarithmic: a training pass, its memory, a decoded token."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from sublayer.train.plot import GREY

    figure = Figure((12, 4.8), layout="constrained")
    panels = [
        ("forward and backward, ms", _best(passes, 1e3)),
        ("peak of forward and backward, MiB", _over(taken, 2**20)),
        ("a decoded token, ms", _best(decoded, 1e3)),
    ]
    lines: list[Any] = []
    for axes, (title, found) in zip(cast(Any, figure.subplots(1, 3)), panels, strict=True):
        lengths = sorted({length for by_length in found.values() for length in by_length})
        drawn = [
            axes.plot(list(found[name]), list(found[name].values()), linewidth=1.4, markersize=3, **style)[0]
            for name, style in STYLES.items()
            if name in found
        ]
        lines = lines or drawn
        axes.set(xscale="log", yscale="log", xticks=lengths)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_title(title, color=GREY, fontsize=10)
        axes.set_xlabel("length", color=GREY)
        axes.tick_params(colors=GREY, length=0, labelsize=8)
        axes.grid(color=GREY, alpha=0.2)
        axes.spines[:].set_visible(False)
    figure.legend(
        lines,
        list(STYLES)[: len(lines)],
        frameon=False,
        labelcolor=GREY,
        loc="outside lower center",
        ncols=7,
        fontsize=9,
    )
    figure.savefig(path, format="png", dpi=150, transparent=True)


# One colour a kind, one line style within it.
_COLOURS = {"attention": "#3b82d6", "recurrent": "#e8833a", "linear": "#2a9d6f", "state": "#c04a8a", "other": "#7d8590"}
_KINDS = {
    "attention": ("attention", f"attention, window {WINDOW}", "latent attention", "additive in a GRU"),
    "recurrent": ("Elman", "LSTM", "GRU"),
    "linear": ("linear attention", "gated delta"),
    "state": ("S4", "S4D", "Mamba", "Mamba-2"),
    "other": ("gated convolution",),
}
_LINES = ("o-", "s--", "^:", "d-.")
STYLES: dict[str, dict[str, Any]] = {
    name: {"color": _COLOURS[kind], "marker": line[0], "linestyle": line[1:]}
    for kind, names in _KINDS.items()
    for name, line in zip(names, _LINES, strict=False)
}
