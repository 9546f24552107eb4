"""Who sees whom in attention, as data: combined with `&`, materialised late, computed once a forward pass.

B batch, N heads, L query length, M key length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import MaskError

Made = TypeVar("Made")


class Span(NamedTuple):
    """One document of a row: which of its queries and keys belong together."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    k_place: int  # the position, counted as `prefix` and `keep_first` count it, of the document's first key
    aligned: bool  # the last query has the position of the last key, as a call without a layout takes it


def _nothing() -> dict[Any, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Layout:
    """Where queries and keys lie: their positions and documents. One object a forward pass, shared by all layers.

    q_pos [B|1, L], k_pos [B|1, M]: integer positions. k_pos None: keys lie at 0 … M-1; q_pos None: the last query has
    the position of the last key.
    q_segment [B|1, L], k_segment [B|1, M]: document numbers; 0 is padding, which sees nothing and is seen by nothing.
    One of the two None beside the other stands for ones.
    clean: whoever made the layout vouches that the keys and values no query sees are finite (the decoding state keeps
    zeros there), so `attend` need not zero them.
    """

    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    q_segment: Tensor | None = None
    k_segment: Tensor | None = None
    clean: bool = False
    memo: dict[Any, Any] = field(default_factory=_nothing, init=False, repr=False)

    def positions(self, L: int, M: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of queries [B|1, L] and keys [B|1, M]; differences inside one document are what counts."""
        k_pos = torch.arange(M, device=device)[None] if self.k_pos is None else self.k_pos
        if self.q_pos is not None:
            return self.q_pos, k_pos
        return torch.arange(M - L, M, device=device)[None], k_pos

    def places(self, M: int, device: torch.device) -> Tensor:
        """Positions of keys [B|1, M] counted from the start of their document, which is where `prefix` counts from."""
        if self.k_pos is not None:
            return self.k_pos
        index = torch.arange(M, device=device)[None]
        if self.k_segment is None:
            return index
        starts = torch.ones_like(self.k_segment, dtype=torch.bool)
        starts[:, 1:] = self.k_segment[:, 1:] != self.k_segment[:, :-1]
        return index - torch.where(starts, index, 0).cummax(1).values

    def spans(self, L: int, M: int) -> tuple[tuple[Span, ...], ...] | None:
        """Each row's documents, when each is one run of consecutive positions; else None. Padding is in no span.

        Reads values, so it is None when compiling; computed once. A layout of one row stands for all rows.
        """
        if torch.compiler.is_compiling():
            return None
        return self.remembered(("spans", L, M), lambda: self._spans(L, M))

    def _spans(self, L: int, M: int) -> tuple[tuple[Span, ...], ...] | None:
        q_runs = _runs(self.q_segment, self.q_pos, L)
        same = self.q_segment is self.k_segment and self.q_pos is self.k_pos and L == M
        k_runs = q_runs if same else _runs(self.k_segment, self.k_pos, M)
        if q_runs is None or k_runs is None:
            return None
        rows: list[tuple[Span, ...]] = []
        for row in range(max(len(q_runs), len(k_runs))):
            spans: list[Span] = []
            keys = k_runs[row if len(k_runs) > 1 else 0]
            for segment, (q_start, q_stop, q_first) in q_runs[row if len(q_runs) > 1 else 0].items():
                if segment not in keys:
                    continue
                k_start, k_stop, k_first = keys[segment]
                # A side without positions is counted by index, from the end of the whole row.
                q_last = q_stop - 1 - q_start + q_first if self.q_pos is not None else q_stop - 1 + M - L
                k_last = k_stop - 1 - k_start + k_first if self.k_pos is not None else k_stop - 1
                k_place = k_first if self.k_pos is not None else (k_start if self.k_segment is None else 0)
                spans.append(Span(q_start, q_stop, k_start, k_stop, k_place, q_last == k_last))
            rows.append(tuple(spans))
        return tuple(rows)

    def remembered(self, key: Any, make: Callable[[], Made]) -> Made:
        """make(), once a key; when compiling always, for a graph keeps nothing (inductor merges equal expressions)."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def __post_init__(self) -> None:
        if self.k_pos is not None and self.q_pos is None:
            raise MaskError("a layout with positions of keys needs positions of queries too: q_pos is None")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query may see; `a & b` is what both let it see. The bare Mask() hides nothing.

    causal: keys at the query's position or before.
    window: keys less than `window` positions away, the query's own included (a window of 1 is the query itself).
    keep_first: keys at positions below this stay visible past the window (attention sinks, arXiv 2309.17453).
    prefix: int or [B]: causal or key position < prefix. It implies the causal part and replaces `causal`.
    allowed: explicit bool, broadcastable to [B, N, L, M].
    layout: positions and documents; None aligns the last query with the last key.
    Raises MaskError for a window below 1, a negative keep_first, or an `allowed` that is not bool.
    """

    causal: bool = False
    window: int | None = None
    keep_first: int = 0
    prefix: Tensor | int | None = None
    allowed: Tensor | None = None
    layout: Layout | None = None

    def __and__(self, other: "Mask") -> "Mask":
        """What both masks let through, exactly. Raises MaskError where no Mask says that."""
        if self.layout is not None and other.layout is not None and self.layout is not other.layout:
            raise MaskError("two masks with different layouts cannot be combined: share one Layout object")
        causal = self.causal or other.causal
        window, keep_first = _narrower(self, other)
        return Mask(
            causal=causal,
            window=window,
            keep_first=keep_first,
            prefix=None if causal else _shorter(self.prefix, other.prefix),
            allowed=both(self.allowed, other.allowed),
            layout=self.layout if self.layout is not None else other.layout,
        )

    def materialise(self, L: int, M: int, device: torch.device | str) -> Tensor | None:
        """bool [B|1, N|1, L, M], True where visible; None when nothing is hidden. Built once a layout."""
        return self.cells(L, M, device)[0]

    def cells(self, L: int, M: int, device: torch.device | str) -> tuple[Tensor | None, Tensor | None]:
        """What `materialise` gives, and the keys no query of the row sees in any head: bool [B|1, M], None for none."""
        device = torch.device(device)
        if self.layout is None:
            return self._cells(L, M, device)
        prefix, allowed = identity(self.prefix), identity(self.allowed)
        key = ("cells", self.causal, self.window, self.keep_first, prefix, allowed, L, M, device)
        kept = self.layout.remembered(key, lambda: (self.prefix, self.allowed, self._cells(L, M, device)))
        return kept[2]

    def reach(self, L: int, M: int, device: torch.device | str) -> slice | None:
        """The keys from the first to the last that any row sees; None: all, as always when compiling."""
        unseen = self.cells(L, M, device)[1]
        if unseen is None or self.layout is None or torch.compiler.is_compiling():
            return None

        def find() -> tuple[Tensor, slice | None]:
            shown: list[int] = plain((~unseen).any(0).nonzero()[:, 0])
            some = shown and (shown[0] > 0 or shown[-1] + 1 < M)
            return unseen, slice(shown[0], shown[-1] + 1) if some else None

        return self.layout.remembered(("reach", id(unseen)), find)[1]

    def tiles(self, L: int, M: int, size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """For tiles of `size` queries by `size` keys, [B|1, rows, columns] bool: may a cell be visible; are all.

        Decided from the least and greatest position, place and document number of each run, in memory linear in
        length: the first may be too generous and the second too strict, and neither the other way.
        """
        layout, device = self.layout if self.layout is not None else Layout(), torch.device(device)
        q_pos, k_pos = layout.positions(L, M, device)
        q_low, q_high = (x[:, :, None] for x in _bounds(q_pos, size))
        k_low, k_high = (x[:, None, :] for x in _bounds(k_pos, size))
        place_low, place_high = (x[:, None, :] for x in _bounds(layout.places(M, device), size))
        nearest, farthest = q_low - k_high, q_high - k_low  # of q_pos - k_pos
        some = torch.ones_like(nearest, dtype=torch.bool)
        whole = torch.full_like(some, self.allowed is None)
        if self.causal:
            some, whole = some & (farthest >= 0), whole & (nearest >= 0)
        if self.prefix is not None:
            prefix = self.prefix[:, None, None] if isinstance(self.prefix, Tensor) else self.prefix
            some = some & ((farthest >= 0) | (place_low < prefix))
            whole = whole & ((nearest >= 0) | (place_high < prefix))
        if self.window is not None:
            near, all_near = nearest < self.window, farthest < self.window
            if not self.causal:
                near, all_near = near & (farthest > -self.window), all_near & (nearest > -self.window)
            if self.keep_first:
                near, all_near = near | (place_low < self.keep_first), all_near | (place_high < self.keep_first)
            some, whole = some & near, whole & all_near
        if layout.q_segment is not None or layout.k_segment is not None:
            one = torch.ones(1, 1, dtype=torch.long, device=device)
            q_segment = one.expand(1, L) if layout.q_segment is None else layout.q_segment
            k_segment = one.expand(1, M) if layout.k_segment is None else layout.k_segment
            q_first, q_last = (x[:, :, None] for x in _bounds(q_segment, size))
            k_first, k_last = (x[:, None, :] for x in _bounds(k_segment, size))
            some = some & (q_first <= k_last) & (k_first <= q_last) & (q_last > 0) & (k_last > 0)
            whole = whole & (q_first == k_last) & (k_first == q_last) & (q_first > 0)
        return some, whole

    @property
    def positional(self) -> bool:
        """Visibility depends on positions, not on documents alone."""
        return self.causal or self.window is not None or self.prefix is not None

    def _cells(self, L: int, M: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        layout = self.layout if self.layout is not None else Layout()
        q_pos, k_pos = layout.positions(L, M, device)
        needs_places = self.prefix is not None or self.keep_first > 0
        prefix = self.prefix[:, None, None] if isinstance(self.prefix, Tensor) else self.prefix
        seen = visible(
            self,
            q_pos=q_pos[:, :, None],
            k_pos=k_pos[:, None, :],
            k_place=layout.places(M, device)[:, None, :] if needs_places else None,
            prefix=prefix,
            q_segment=None if layout.q_segment is None else layout.q_segment[:, :, None],
            k_segment=None if layout.k_segment is None else layout.k_segment[:, None, :],
        )
        seen = None if seen is None else seen[:, None]
        seen = both(seen, self.allowed)
        if seen is None:
            return None, None
        seen = seen[(None,) * (4 - seen.ndim)]
        seen = seen.expand(seen.shape[0], seen.shape[1], L, M)
        unseen = ~seen.flatten(1, 2).any(1)
        # Reading values waits for the device, which is free on a CPU only; there it spares the kernels a mask.
        if torch.compiler.is_compiling() or device.type != "cpu":
            return seen, unseen
        return (None if bool(seen.all()) else seen), (unseen if bool(unseen.any()) else None)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise MaskError(f"window = {self.window} would hide every key: give at least 1, or None for no window")
        if self.keep_first < 0:
            raise MaskError(f"keep_first = {self.keep_first}: give the number of first keys to keep, or 0")
        if self.allowed is not None and self.allowed.dtype != torch.bool:
            raise MaskError(f"allowed is {self.allowed.dtype}: give bool, True where visible; scores go into `bias`")
        if self.prefix is not None and self.causal:
            object.__setattr__(self, "causal", False)  # prefix replaces causal; `&` is the way to narrow it


def visible(
    mask: Mask,
    *,
    q_pos: Tensor,
    k_pos: Tensor,
    k_place: Tensor | None,
    prefix: Tensor | int | None,
    q_segment: Tensor | None,
    k_segment: Tensor | None,
) -> Tensor | None:
    """The one statement of what a Mask means, on anything that broadcasts: whole rows, blocks, or single cells.

    Returns bool, or None when nothing is hidden. `allowed` is left to the caller.
    """
    seen: Tensor | None = None
    distance = q_pos - k_pos
    if mask.causal:
        seen = distance >= 0
    if prefix is not None and k_place is not None:
        seen = (distance >= 0) | (k_place < prefix)
    if mask.window is not None:
        near = distance < mask.window
        if not mask.causal:
            near = near & (distance > -mask.window)
        if mask.keep_first and k_place is not None:
            near = near | (k_place < mask.keep_first)
        seen = both(seen, near)
    if q_segment is not None and k_segment is not None:
        seen = both(seen, (q_segment == k_segment) & (q_segment != 0))
    elif k_segment is not None:
        seen = both(seen, k_segment == 1)
    elif q_segment is not None:
        seen = both(seen, q_segment == 1)
    return seen


def plain(x: Tensor) -> Any:
    """Nested lists of numbers. It waits for the device."""
    return x.tolist()  # pyright: ignore -- torch leaves it untyped


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a & b, where None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _runs(segment: Tensor | None, pos: Tensor | None, length: int) -> list[dict[int, tuple[int, int, int]]] | None:
    """A row's documents: number to (start, stop, first position); None when one is torn or its positions jump."""
    if segment is None and pos is None:
        return [{1: (0, length, 0)}]
    rows = max(x.shape[0] for x in (segment, pos) if x is not None)
    numbers = torch.ones(rows, length, dtype=torch.long) if segment is None else segment.cpu().expand(rows, -1)
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    places = None if pos is None else pos.cpu().expand(rows, -1)
    if places is not None:
        consecutive = (places[:, 1:] - places[:, :-1] == 1) | starts[:, 1:] | (numbers[:, 1:] == 0)
        if not bool(consecutive.all()):
            return None
    found: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(rows)]
    where = starts.nonzero()
    begins: list[list[int]] = plain(where)
    of: list[int] = plain(numbers[starts])
    firsts: list[int] = [0] * len(of) if places is None else plain(places[starts])
    for i, ((row, start), number, first) in enumerate(zip(begins, of, firsts, strict=True)):
        if number == 0:
            continue
        if number in found[row]:
            return None
        stop = begins[i + 1][1] if i + 1 < len(begins) and begins[i + 1][0] == row else length
        found[row][number] = (start, stop, first)
    return found


def _bounds(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each run of `size` in x [B, length], each [B, runs]; the last run may be shorter."""
    runs = -(-x.shape[1] // size)
    index = torch.arange(runs * size, device=x.device).clamp(max=x.shape[1] - 1)
    found = torch.unflatten(x[:, index], 1, (runs, size)).aminmax(dim=2)
    return found.min, found.max


def _narrower(a: Mask, b: Mask) -> tuple[int | None, int]:
    """Window and keep_first of the intersection. Without a window, keep_first says nothing."""
    if a.window is None or b.window is None:
        one = b if a.window is None else a
        return one.window, one.keep_first if one.window is not None else 0
    if a.window > b.window:
        a, b = b, a
    assert a.window is not None
    assert b.window is not None
    if a.keep_first <= b.keep_first or a.window == b.window:
        return a.window, min(a.keep_first, b.keep_first)
    raise MaskError(
        f"window {a.window} with keep_first {a.keep_first} and window {b.window} with keep_first {b.keep_first} "
        "have no common mask: give both the same keep_first"
    )


def _shorter(a: Tensor | int | None, b: Tensor | int | None) -> Tensor | int | None:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if isinstance(a, Tensor):
        return torch.minimum(a, torch.as_tensor(b, device=a.device))
    assert isinstance(b, Tensor)
    return torch.minimum(b, torch.as_tensor(a, device=b.device))


def identity(given: Tensor | int | None) -> int | None:
    """What stands for a tensor in a key of a layout's memo, which keeps the tensor alive; nothing while compiling, when
    nothing is remembered (and torch 2.11 traces no id)."""
    if isinstance(given, Tensor):
        return None if torch.compiler.is_compiling() else id(given)
    return given
