"""Masks as data: what each field means (against plain loops), what `&` means, what is computed once."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.errors import MaskError
from sublayer.nn.mask import Layout, Mask
from tests.nn.attention import present

SEGMENT = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 0], [0, 0, 4, 4, 4, 4, 4, 4]])
POSITION = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 0], [0, 0, 0, 1, 2, 3, 4, 5]])


def sees(mask: Mask, row: int, head: int, i: int, j: int, L: int, M: int) -> bool:
    """The meaning of a mask for one query and one key, in the words of its docstring."""
    layout = mask.layout or Layout()
    q_pos = i + M - L if layout.q_pos is None else int(layout.q_pos[row, i])
    k_pos = j if layout.k_pos is None else int(layout.k_pos[row, j])
    place = k_pos
    if layout.k_pos is None and layout.k_segment is not None:
        start = j
        while start > 0 and layout.k_segment[row, start - 1] == layout.k_segment[row, j]:
            start -= 1
        place = j - start
    q_segment = 1 if layout.q_segment is None else int(layout.q_segment[row, i])
    k_segment = 1 if layout.k_segment is None else int(layout.k_segment[row, j])
    if q_segment != k_segment or q_segment == 0:
        return False
    if mask.allowed is not None and not mask.allowed.expand(2, 4, L, M)[row, head, i, j]:
        return False
    if mask.causal and k_pos > q_pos:
        return False
    if mask.prefix is not None:
        prefix = mask.prefix if isinstance(mask.prefix, int) else int(mask.prefix[row])
        if k_pos > q_pos and place >= prefix:
            return False
    return mask.window is None or abs(q_pos - k_pos) < mask.window or place < mask.keep_first


def by_loops(mask: Mask, L: int, M: int) -> torch.Tensor:
    return torch.tensor(
        [[[[sees(mask, b, n, i, j, L, M) for j in range(M)] for i in range(L)] for n in range(4)] for b in range(2)]
    )


FIELDS = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "causal window": {"causal": True, "window": 2},
    "kept first": {"causal": True, "window": 2, "keep_first": 2},
    "kept first, both ways": {"window": 2, "keep_first": 1},
    "prefix": {"prefix": 2},
    "prefix a row": {"prefix": torch.tensor([1, 3])},
    "prefix and window": {"prefix": 4, "window": 3},
    "allowed": {"allowed": torch.rand(4, 1, 8, generator=torch.Generator().manual_seed(0)) > 0.4, "causal": True},
}
LAYOUTS = {
    "aligned": None,
    "documents": Layout(q_segment=SEGMENT, k_segment=SEGMENT),
    "documents and positions": Layout(POSITION, POSITION, SEGMENT, SEGMENT),
    "positions": Layout(POSITION + 3, POSITION),
    "padded keys": Layout(k_segment=SEGMENT.clamp(max=1)),
    "padded queries": Layout(q_segment=SEGMENT.clamp(max=1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", FIELDS)
def test_a_mask_means_what_its_words_say(fields, layout):
    mask = Mask(**FIELDS[fields], layout=LAYOUTS[layout])
    visible, unseen = mask.cells(8, 8, "cpu")
    expected = by_loops(mask, 8, 8)
    visible = torch.ones_like(expected) if visible is None else visible
    torch.testing.assert_close(visible.expand_as(expected), expected)
    unseen = torch.zeros(2, 8, dtype=torch.bool) if unseen is None else unseen
    torch.testing.assert_close(unseen.expand(2, 8), ~expected.any(2).any(1))


@pytest.mark.parametrize(("L", "M"), [(3, 8), (8, 3), (1, 8)])
@pytest.mark.parametrize("fields", [name for name in FIELDS if name != "allowed"])
def test_the_last_query_is_aligned_with_the_last_key(fields, L, M):
    mask = Mask(**FIELDS[fields])
    visible = mask.materialise(L, M, "cpu")
    expected = by_loops(mask, L, M)
    visible = torch.ones_like(expected) if visible is None else visible
    torch.testing.assert_close(visible.expand_as(expected), expected)


@st.composite
def masks(draw):
    return Mask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 9)),
        keep_first=draw(st.integers(0, 3)),
        prefix=draw(st.none() | st.integers(0, 8) | st.sampled_from([torch.tensor([1, 5]), torch.tensor([4, 2])])),
        allowed=draw(st.none() | st.just(FIELDS["allowed"]["allowed"])),
        layout=draw(st.sampled_from([None, LAYOUTS["documents"]])),
    )


@settings(max_examples=150, deadline=None)
@given(masks(), masks())
def test_and_is_what_both_let_through(a, b):
    layout = a.layout if a.layout is not None else b.layout
    expected = torch.ones(2, 4, 8, 8, dtype=torch.bool)
    for one in (a, b):
        alone = Mask(one.causal, one.window, one.keep_first, one.prefix, one.allowed, layout).materialise(8, 8, "cpu")
        expected = expected if alone is None else expected & alone
    try:
        both = (a & b).materialise(8, 8, "cpu")
    except MaskError:  # the one pair that no Mask expresses
        narrow, wide = sorted((a, b), key=lambda mask: mask.window or 0)
        assert narrow.window < wide.window
        assert narrow.keep_first > wide.keep_first
        return
    both = torch.ones_like(expected) if both is None else both
    torch.testing.assert_close(both.expand_as(expected), expected)


def test_prefix_replaces_causal_but_and_narrows_it():
    replaced = present(Mask(causal=True, prefix=3).materialise(4, 4, "cpu"))
    assert replaced[0, 0, 0].tolist() == [True, True, True, False]
    narrowed = present((Mask(causal=True) & Mask(prefix=3)).materialise(4, 4, "cpu"))
    assert narrowed[0, 0, 0].tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"window": 0}, "window = 0 would hide every key: give at least 1, or None for no window"),
        ({"window": -1}, "window = -1 would hide every key: give at least 1, or None for no window"),
        ({"keep_first": -2}, "keep_first = -2: give the number of first keys to keep, or 0"),
        (
            {"allowed": torch.zeros(2, 2)},
            "allowed is torch.float32: give bool, True where visible; scores go into `bias`",
        ),
    ],
)
def test_a_mask_that_cannot_be_meant_is_refused_in_one_line(fields, line):
    with pytest.raises(MaskError) as error:
        Mask(**fields)
    assert str(error.value) == line


def test_layouts_do_not_mix():
    with pytest.raises(MaskError, match="share one Layout object"):
        _ = Mask(layout=LAYOUTS["documents"]) & Mask(layout=LAYOUTS["positions"])
    with pytest.raises(MaskError, match="positions of queries"):
        Layout(k_pos=POSITION)


def test_spans_are_the_documents():
    rows = present(Layout(q_segment=SEGMENT, k_segment=SEGMENT).spans(8, 8))
    assert [[span[:4] for span in row] for row in rows] == [
        [(0, 3, 0, 3), (3, 5, 3, 5), (5, 7, 5, 7)],
        [(2, 8, 2, 8)],
    ]
    assert all(span.aligned and span.k_place == 0 for row in rows for span in row)


def test_spans_keep_the_positions_of_a_document_that_is_continued():
    layout = Layout(torch.tensor([[5, 6, 7]]), torch.tensor([[2, 3, 4, 5, 6, 7]]))
    ((span,),) = present(layout.spans(3, 6))
    assert span == (0, 3, 0, 6, 2, True)
    ((span,),) = present(Layout(torch.tensor([[4, 5, 6]]), torch.tensor([[2, 3, 4, 5, 6, 7]])).spans(3, 6))
    assert not span.aligned


def test_spans_pair_cross_attention_by_number():
    queries, keys = torch.tensor([[2, 2, 1, 3]]), torch.tensor([[1, 1, 0, 2, 2, 2]])
    (row,) = present(Layout(q_segment=queries, k_segment=keys).spans(4, 6))
    assert [span[:4] for span in row] == [(0, 2, 3, 6), (2, 3, 0, 2)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(q_segment=torch.tensor([[1, 2, 1]]), k_segment=torch.tensor([[1, 2, 1]])),
        Layout(torch.tensor([[0, 2, 3]]), torch.tensor([[0, 2, 3]])),
        Layout(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 1]])),
    ],
    ids=["torn document", "jump", "repeated key position"],
)
def test_no_spans_where_documents_are_torn(layout):
    assert layout.spans(3, 3) is None


def test_thirty_layers_build_a_mask_once():
    layout = Layout(q_segment=SEGMENT, k_segment=SEGMENT)
    prefix = torch.tensor([1, 3])
    first = Mask(causal=True, window=2, layout=layout).materialise(8, 8, "cpu")
    assert all(Mask(causal=True, window=2, layout=layout).materialise(8, 8, "cpu") is first for _ in range(30))
    for other in (
        Mask(causal=True, window=3, layout=layout),
        Mask(window=2, layout=layout),
        Mask(causal=True, window=2, keep_first=1, layout=layout),
        Mask(prefix=prefix, window=2, layout=layout),
        Mask(causal=True, window=2, layout=Layout(q_segment=SEGMENT, k_segment=SEGMENT)),
    ):
        assert other.materialise(8, 8, "cpu") is not first
    assert layout.spans(8, 8) is layout.spans(8, 8)


def test_prefixes_of_two_calls_are_told_apart():
    layout = Layout(q_segment=SEGMENT, k_segment=SEGMENT)
    for value in range(5):  # a memo keyed by identity must keep what it is keyed by alive
        mask = Mask(prefix=torch.full((2,), value), layout=layout)
        torch.testing.assert_close(present(mask.materialise(8, 8, "cpu")).expand(2, 4, 8, 8), by_loops(mask, 8, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tiles_say_some_and_all_on_the_safe_side(size, fields, layout):
    mask = Mask(**FIELDS[fields], layout=LAYOUTS[layout])
    visible = mask.materialise(8, 8, "cpu")
    visible = torch.ones(2, 1, 8, 8, dtype=torch.bool) if visible is None else visible.expand(2, -1, 8, 8)
    some, whole = (x.expand(2, -1, -1) for x in mask.tiles(8, 8, size, "cpu"))
    for i, j in product(range(-(-8 // size)), repeat=2):
        cells = visible[:, :, i * size : (i + 1) * size, j * size : (j + 1) * size].flatten(1)
        assert (some[:, i, j] | ~cells.any(1)).all()
        assert (~whole[:, i, j] | cells.all(1)).all()
        if size == 1 and mask.allowed is None:  # a tile of one cell leaves nothing to doubt
            torch.testing.assert_close(some[:, i, j], cells.any(1))


def test_nothing_hidden_is_no_mask():
    assert Mask().materialise(4, 4, "cpu") is None
    assert Mask(causal=True).materialise(1, 4, "cpu") is None
    assert Mask(window=4).materialise(4, 4, "cpu") is None
    ones = torch.ones(2, 4, dtype=torch.long)
    assert Mask(layout=Layout(q_segment=ones, k_segment=ones)).materialise(4, 4, "cpu") is None


def test_a_mask_is_built_inside_one_graph():
    def build(pos, segment):
        mask = Mask(causal=True, window=2, keep_first=1, layout=Layout(pos, pos, segment, segment))
        return mask.materialise(8, 8, pos.device)

    compiled = torch.compile(build, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(POSITION, SEGMENT), build(POSITION, SEGMENT))


def test_reach_is_from_the_first_to_the_last_key_that_any_row_sees() -> None:
    q_pos, k_pos = torch.tensor([[9], [7]]), torch.arange(12).expand(2, 12)
    held = torch.tensor([[1] * 10 + [0] * 2, [1] * 8 + [0] * 4])
    layout = Layout(q_pos, k_pos, torch.ones(2, 1, dtype=torch.long), held)
    assert Mask(causal=True, window=3, layout=layout).reach(1, 12, "cpu") == slice(5, 10)
    assert Mask(causal=True, layout=layout).reach(1, 12, "cpu") == slice(0, 10)
    assert Mask(causal=True).reach(1, 12, "cpu") is None
