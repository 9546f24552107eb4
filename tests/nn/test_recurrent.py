"""Recurrent layers against torch.nn's in fp64: answers, last states and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sublayer.errors import SpecError, StateError
from sublayer.nn.documents import Documents
from sublayer.nn.op import Context
from sublayer.nn.recurrent import Cell, Kind, Reader, Recurrent, RecurrentOp
from sublayer.nn.sublayer import Model, Trunk
from sublayer.state import State
from sublayer.step import Shared, Step, document_starts
from tests.case import assert_near

D, H = 5, 4
KINDS: tuple[Kind, ...] = ("elman", "lstm", "gru")
THEIRS: dict[str, Any] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
CELLS: dict[str, Any] = {"elman": nn.RNNCell, "lstm": nn.LSTMCell, "gru": nn.GRUCell}
PARAMETERS = {"input": "weight_ih", "recurrent": "weight_hh", "input_bias": "bias_ih", "recurrent_bias": "bias_hh"}
# Two documents of one length; ragged ones with padding everywhere; one so long that padding would be most of the work.
SEGMENTS = {
    "equal": [[1] * 4, [1] * 4],
    "ragged": [[0, 3, 3, 0, 1, 1, 1, 0, 7], [2] * 5 + [0] * 4, [0] * 9],
    "one long": [[1] * 20 + [2], [1, 2, 3, 4, 5, 6, 7, 8, 9] + [0] * 12],
}


def pair(kind: Kind, **options: Any) -> tuple[RecurrentOp, nn.Module]:
    """Ours with the parameters of theirs."""
    torch.manual_seed(1)
    spec = Recurrent(kind, H, **options)
    ours = RecurrentOp(spec, D).double()
    theirs = THEIRS[kind](D, H, batch_first=True, bidirectional=spec.direction == "both", bias=spec.bias).double()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_()
            mine(ours, name).copy_(parameter)
    return ours, theirs


def mine(ours: RecurrentOp, name: str) -> Tensor:
    """Our parameter of their name, such as weight_ih_l0_reverse."""
    cell = ours.back if name.endswith("_reverse") or ours.cell is None else ours.cell
    return getattr(cell, {theirs: our for our, theirs in PARAMETERS.items()}[name.partition("_l0")[0]])


def packed(segment: list[list[int]]) -> tuple[Tensor, Step]:
    numbers = torch.tensor(segment)
    x = torch.randn(*numbers.shape, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, Step(segment=numbers, shared=Shared(starts=document_starts(numbers)))


def alone(theirs: nn.Module, x: Tensor, segment: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Their outputs of every real token, and the last state [directions, S] of each row's documents."""
    outputs, last = torch.zeros(*segment.shape, 1), [[] for _ in segment]
    found = []
    for row, numbers in enumerate(segment):
        for number in dict.fromkeys(numbers[numbers != 0].tolist()):
            y, ends = theirs(x[row][numbers == number][None])
            found.append(((row, numbers == number), y[0]))
            last[row].append(torch.cat([end[:, 0] for end in (ends if isinstance(ends, tuple) else (ends,))], -1))
    outputs = torch.zeros(*segment.shape, found[0][1].shape[-1], dtype=x.dtype)
    for place, y in found:
        outputs = outputs.index_put((torch.tensor(place[0]).expand(int(place[1].sum())), place[1].nonzero()[:, 0]), y)
    return outputs, last


@pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"direction": "both"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_packed_rows_are_read_as_torch_reads_them_alone(kind: Kind, options: Any, segment: Any) -> None:
    ours, theirs = pair(kind, **options)
    x, step = packed(segment)
    assert step.segment is not None
    real = step.segment != 0
    y, last = ours.read(x, step)
    if ours.back is None:
        assert_near(ours(x, step)[real], y[real], 1e-12)
    expected, ends = alone(theirs, x, step.segment)
    assert_near(y[real], expected[real], 1e-12)
    for row, documents in enumerate(ends):
        for found, end in zip(last[row], documents, strict=False):
            assert_near(found, end[-1], 1e-12)  # of both directions, the one that reads backward
    for answer in (y[real] + last.sum(), expected[real] + sum(end[-1].sum() for row in ends for end in row)):
        answer.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        gradient = mine(ours, name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert_near(gradient, parameter.grad, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_are_what_torch_makes_of_packed_sequences(kind: Kind) -> None:
    ours, theirs = pair(kind, direction="both")
    x, step = packed([[1] * 6, [1] * 2 + [0] * 4, [1] * 5 + [0]])
    y, last = ours.read(x, step)
    found, ends = theirs(pack_padded_sequence(x, torch.tensor([6, 2, 5]), batch_first=True, enforce_sorted=False))
    assert_near(y, pad_packed_sequence(found, batch_first=True)[0], 1e-12)
    assert_near(last[:, 0, :H], (ends[0] if kind == "lstm" else ends)[1], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_rows_and_reading_backward(kind: Kind) -> None:
    ours, theirs = pair(kind)
    x, _ = packed([[1] * 7, [1] * 7])
    assert_near(ours(x, Step()), theirs(x)[0], 1e-12)
    back, theirs = pair(kind, direction="backward")
    assert_near(back(x, Step()), theirs(x.flip(1))[0].flip(1), 1e-12)
    with pytest.raises(StateError, match="cannot be continued"):
        back(x, Step(), State.allocate(back, 2, 7))
    assert not back.state()


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_is_the_cell_of_torch(kind: Kind) -> None:
    ours, theirs = pair(kind)
    cell = CELLS[kind](D, H).double()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in theirs.state_dict().items()})
    x, carry = torch.randn(3, D).double(), torch.randn(3, ours.size).double()
    expected = cell(x, tuple(carry.chunk(2, -1)) if kind == "lstm" else carry)
    assert isinstance(ours.cell, Cell)
    expected = torch.cat(expected, -1) if kind == "lstm" else expected
    assert_near(ours.cell.move(ours.cell.given(x), carry), expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_of_compiled_models_equals_the_kernels(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(kind, begin=1)
    x, step = packed(SEGMENTS["ragged"])
    step = step.replace(
        condition=torch.randn(3, 2, 2, ours.size).double(), memory_segment=torch.tensor([[3, 1], [9, 2], [4, 0]])
    )
    assert step.segment is not None
    real, expected = step.segment != 0, ours(x, step)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_near(ours(x, step)[real], expected[real], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_each_document_starts_from_the_state_of_its_number(kind: Kind) -> None:
    """The memory holds documents 7, 3 and 2; the tokens' are 3, 2, 9 and 7 in this order."""
    ours, theirs = pair(kind, begin=1)
    x, step = packed([[3, 3, 0, 2, 9, 9, 7]])
    states = torch.randn(1, 3, 2, ours.size, dtype=torch.float64)
    y = ours(x, step.replace(condition=states, memory_segment=torch.tensor([[7, 0, 3, 3, 2]])))
    for document, index in (([0, 1], 1), ([3], 2), ([4, 5], None), ([6], 0)):
        first = torch.zeros_like(states[0, :1, 1]) if index is None else states[0, index : index + 1, 1]
        hidden = first[:, None].contiguous()
        hidden = tuple(part.contiguous() for part in hidden.chunk(2, -1)) if kind == "lstm" else hidden
        assert_near(y[:, document], theirs(x[:, document], hidden)[0], 1e-12)
    unnamed = ours(x, Step(condition=states))
    hidden = states[:, :1, 1].contiguous()
    hidden = tuple(part.contiguous() for part in hidden.chunk(2, -1)) if kind == "lstm" else hidden
    assert_near(unnamed, theirs(x, hidden)[0], 1e-12)


@pytest.mark.parametrize("directions", [("forward", "forward"), ("both", "backward")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_leaves_the_last_states_of_all_layers(kind: Kind, directions: Any) -> None:
    layers = tuple(Recurrent(kind, H, direction=direction) for direction in directions)
    model = Model(D, encoder=Trunk(Reader(11, layers=layers), ()), head=None).build(seed=1, dtype=torch.float64).eval()
    reader = model.get_submodule("encoder.embed")
    a, b, c = torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])
    ids = torch.stack([torch.cat([a, b, torch.zeros(1, dtype=torch.long)]), torch.cat([torch.tensor([0, 0]), c])])
    memory, step = model.encode(ids, Step(memory_segment=torch.tensor([[5, 5, 5, 2, 2, 0], [0, 0, 1, 1, 1, 1]])))
    assert step.condition is not None
    assert step.condition.shape == (2, 2, 2, H * (1 + (kind == "lstm")))
    for document, row, place, tokens in ((a, 0, 0, slice(3)), (b, 0, 1, slice(3, 5)), (c, 1, 0, slice(2, 6))):
        x = model.get_submodule("encoder.embed.tokens")(document[None])
        for i, layer in enumerate(reader.layers):  # pyright: ignore[reportArgumentType]
            x, last = layer.read(x, Step())
            assert_near(step.condition[row, place, i], last[0, 0], 1e-12)
        assert_near(memory[row, tokens], x[0], 1e-12)


def test_the_documents_of_rows_come_apart_and_together() -> None:
    segment = torch.tensor([[0, 4, 4, 0, 4, 2], [0] * 6, [1, 2, 2, 2, 0, 0]])
    documents = Documents.of(segment)
    assert documents.row.tolist() == [0, 0, 1, 2, 2]
    assert documents.number.tolist() == [4, 2, 0, 1, 2]
    assert documents.length.tolist() == [3, 1, 0, 1, 3]
    x = torch.arange(18).view(3, 6)
    wide = documents.split(x)
    assert wide.tolist() == [[1, 2, 4], [5, 0, 0], [0, 0, 0], [12, 0, 0], [13, 14, 15]]
    assert documents.join(wide).tolist() == (x * (segment != 0)).tolist()
    assert documents.reversed(wide)[[0, 4]].tolist() == [[4, 2, 1], [15, 14, 13]]
    assert documents.last(wide).tolist() == [4, 5, 0, 12, 15]
    assert documents.by_row(documents.length).tolist() == [[3, 1], [0, 0], [1, 3]]
    assert documents.newest.tolist() == [1, 2, 4]


def test_documents_of_about_one_length_are_read_together() -> None:
    """One long document among short ones must not make rows of its length of all of them."""
    segment = torch.tensor([[0] + [9] * 100 + [1 + i // 3 % 8 for i in range(300)], [0] * 401])
    documents = Documents.of(segment)
    parts = documents.alike()
    assert sorted(n for numbers, _ in parts for n in numbers.tolist()) == documents.length.nonzero()[:, 0].tolist()
    assert sum(len(part.row) * part.longest for _, part in parts) <= 2 * len(documents.cells)
    x = torch.randn(2, 401, 3, generator=torch.Generator().manual_seed(0))
    joined = torch.stack([part.join(part.split(x)) for _, part in parts]).sum(0)
    assert torch.equal(joined, x * (segment != 0)[..., None])


@pytest.mark.parametrize("back", [False, True])
def test_documents_are_packed_as_torch_packs_them(back: bool) -> None:
    documents = Documents.of(torch.tensor([[0, 4, 4, 0, 4, 2], [0] * 6, [1, 2, 2, 2, 0, 0]]))
    x = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0))
    order, sizes, place = documents.packed(back)
    rows = documents.split(x)[order]
    rows = documents.reversed(documents.split(x))[order] if back else rows
    theirs = pack_padded_sequence(rows, documents.length[order], batch_first=True)
    assert torch.equal(sizes, theirs.batch_sizes)
    assert torch.equal(theirs.data[place], x.flatten(0, 1)[documents.cells])


def test_how_a_layer_begins() -> None:
    op = Model(8, decoder=Trunk(Reader(5, layers=(Recurrent("lstm"),)), ()), head=None).build(seed=3)
    cell: Any = op.get_submodule("decoder.embed.layers.0.cell")
    assert cell.input_bias.view(4, 8).sum(1).tolist() == [0, 8, 0, 0]
    assert not cell.recurrent_bias.any()
    for weight in (cell.input, cell.recurrent):
        assert 0.9 * 8**-0.5 < weight.abs().max() <= 8**-0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recurrent(hidden=0), "hidden must be above 0"),
        (lambda: Recurrent(begin=-1), "begin is the place of a layer"),
        (lambda: Recurrent(begin=0, direction="both"), "only what reads forward"),
        (lambda: Recurrent("elmann"), "elmann"),  # pyright: ignore[reportArgumentType]
        (lambda: Reader(5), "at least one layer"),
        (lambda: Reader(5, layers=(Recurrent("lstm"), Recurrent("gru"))), "share kind and hidden"),
        (
            lambda: Reader(5, layers=(Recurrent(direction="both"), Recurrent())).build(D, Context()),
            "leave states of one size",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
