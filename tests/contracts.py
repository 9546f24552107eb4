"""The contracts: what holds for every architecture, each written once, over a Case.

Most of them are one statement: a document's logits are those the model gives for the document alone, in one call,
however else it is fed. Numbers are compared relative to the largest absolute value of the tensor.

B batch, L length, M memory length, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from sublayer import weights
from sublayer.errors import MaskError
from sublayer.nn.attend import KERNELS
from sublayer.nn.sublayer import Model, ModelOp
from sublayer.state import PerSlot, PerToken, State
from sublayer.step import Step
from tests.case import (
    CAPACITY,
    EXACT,
    Case,
    Decoding,
    Document,
    Padding,
    Part,
    Together,
    alone,
    assert_near,
    keeps_state,
    leaves,
    noted,
    rough,
    run,
    side_by_side,
    sources_of,
    texts,
    with_images,
    with_its_past,
)

# --- incremental ---


def token_by_token(case: Case, model: ModelOp) -> None:
    (document,) = case.documents(case, [12], 1)
    Decoding(case, model).tokens(Part(document, 2, 0, 12))


def chunked(case: Case, model: ModelOp) -> None:
    """Uneven chunks, the first shorter than any convolution's kernel."""
    (document,) = case.documents(case, [15], 2)
    decoding = Decoding(case, model)
    for start, stop in [(0, 2), (2, 3), (3, 8), (8, 9), (9, 15)]:
        decoding.feed(Part(document, 0, start, stop))


def ragged(case: Case, model: ModelOp) -> None:
    """Prompts prefilled alone, then rows at different positions decoded together, slots in odd and changing orders."""
    a, b, c = case.documents(case, [14, 10, 17], 3)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 3, 0, 6))
    decoding.feed(Part(b, 0, 0, 2))
    decoding.feed(Part(c, 2, 0, 9))
    decoding.tokens(Part(a, 3, 6, 9), Part(b, 0, 2, 5), Part(c, 2, 9, 12))
    decoding.tokens(Part(c, 2, 12, 14), Part(a, 3, 9, 11))
    decoding.feed(Part(b, 0, 5, 8), Part(c, 2, 14, 17), Part(a, 3, 11, 14))


def in_place(case: Case, model: ModelOp) -> None:
    """The same with Step.slots left out: row i is slot i."""
    a, b, c = case.documents(case, [14, 10, 17], 4)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 0, 0, 6), implicit=True)
    decoding.feed(Part(b, 1, 0, 2))
    decoding.feed(Part(c, 2, 0, 9))
    decoding.tokens(Part(a, 0, 6, 9), Part(b, 1, 2, 5), Part(c, 2, 9, 12), implicit=True)
    decoding.feed(Part(a, 0, 9, 12), Part(b, 1, 5, 8), implicit=True)


def forked(case: Case, model: ModelOp) -> None:
    """Two continuations of one prompt; and, without recurrences, one of a part of it."""
    a, b = _with_prefix(case, 14, 7, seed=5)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 1, 0, 7))
    decoding.fork(1, 3)
    decoding.tokens(Part(a, 1, 7, 10), Part(b, 3, 7, 10))
    decoding.tokens(Part(b, 3, 10, 14), Part(a, 1, 10, 14))
    if not decoding.recurrent:
        decoding.fork(3, 0, 7)
        decoding.feed(Part(a, 0, 7, 12))


def truncated(case: Case, model: ModelOp) -> None:
    """A draft is thrown away, NaN in it included; the neighbour's is kept. Recurrences need the snapshot."""
    a, draft = _with_prefix(case, 14, 6, seed=6)
    (b,) = case.documents(case, [14], 7)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 2, 0, 6))
    decoding.feed(Part(b, 0, 0, 8))
    snapshot = decoding.state.snapshot([2])
    decoding.feed(Part(draft, 2, 6, 11), Part(b, 0, 8, 13))
    poison(decoding.state, 2, start=6)
    decoding.state.truncate([2], 6, snapshot if decoding.recurrent else None)
    decoding.past[2].pop()
    decoding.feed(Part(a, 2, 6, 7), Part(b, 0, 13, 14))
    decoding.tokens(Part(a, 2, 7, 14))


def reset(case: Case, model: ModelOp) -> None:
    """A slot whose document ended in NaN serves the next one, of any length, beside a neighbour that goes on."""
    a, b, c = case.documents(case, [13, 8, 16], 8)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 1, 0, 13))
    decoding.feed(Part(c, 2, 0, 10))
    poison(decoding.state, 1)
    decoding.reset(1)
    decoding.feed(Part(b, 1, 0, 3))
    decoding.tokens(Part(b, 1, 3, 8), Part(c, 2, 10, 15))


def reordered(case: Case, model: ModelOp) -> None:
    """Beams: slots become copies of others, twice."""
    a, b, c = case.documents(case, [14, 14, 14], 9)
    decoding = Decoding(case, model)
    for slot, document, length in ((0, a, 5), (1, b, 8), (2, c, 3)):
        decoding.feed(Part(document, slot, 0, length))
    decoding.reorder([2, 0, 0])
    decoding.tokens(Part(c, 0, 3, 6), Part(a, 1, 5, 8), Part(a, 2, 5, 8))
    decoding.reorder([1, 2, 0])
    decoding.tokens(Part(a, 0, 8, 10), Part(a, 1, 8, 10), Part(c, 2, 6, 8), implicit=True)


def saved(case: Case, model: ModelOp) -> None:
    """A state written to a file and read back goes on."""
    a, b = case.documents(case, [10, 12], 10)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 3, 0, 4))
    decoding.feed(Part(b, 1, 0, 7))
    with tempfile.TemporaryDirectory() as folder:
        decoding.state.save(Path(folder) / "state.safetensors")
        decoding.state = State.load(Path(folder) / "state.safetensors", model)
    decoding.tokens(Part(b, 1, 7, 10), Part(a, 3, 4, 7))


INCREMENTAL = (token_by_token, chunked, ragged, in_place, forked, truncated, reset, reordered, saved)


@torch.no_grad()
def incremental(case: Case) -> None:
    """Decoding with a state, in every way it may be fed and edited, equals the forward pass without one."""
    for dtype in EXACT:
        model = rough(case, dtype)
        for way in INCREMENTAL:
            with noted(f"{way.__name__} in {dtype}"):
                way(case, model)


def poison(state: State, slot: int, start: int = 0) -> None:
    """NaN into what a slot keeps, of tokens from `start` on: what an overflow leaves behind; −1 for whole numbers."""
    for name, leaf in state.store.declared.items():
        cells = state.store.tensors[name][slot]
        bad = torch.nan if cells.is_floating_point() else -1
        if isinstance(leaf, PerToken):
            cells[start : int(state.length[slot])] = bad
        elif isinstance(leaf, PerSlot) or start == 0:
            cells[:] = bad


def _with_prefix(case: Case, length: int, shared: int, seed: int) -> tuple[Document, Document]:
    """Two documents of one source with `shared` first tokens in common."""
    a, b = case.documents(case, [length, length], seed)
    return a, a.with_ids(torch.cat([a.ids[:shared], b.ids[shared:]]))


# --- packing ---


class Packed(NamedTuple):
    """Documents behind one another in rows."""

    tokens: Any  # [B, L], in a dict where there are images beside them
    segment: Tensor  # [B, L]
    places: list[tuple[int, slice]]  # of each document, row by row


NUMBERS = (3, 1, 7, 2, 5)  # documents may have any numbers


def pack(rows: Sequence[Sequence[Tensor]]) -> Packed:
    """One padding cell stands after the first document of each row, and what is needed at the end."""
    length = max(sum(map(len, row)) for row in rows) + 2
    tokens = torch.ones(len(rows), length, dtype=torch.long)
    segment = torch.zeros_like(tokens)
    places: list[tuple[int, slice]] = []
    for i, row in enumerate(rows):
        start = 0
        for number, document in zip(NUMBERS, row, strict=False):
            here = slice(start, start + len(document))
            tokens[i, here], segment[i, here] = document, number
            places.append((i, here))
            start = here.stop + (number == NUMBERS[0])
    return Packed(tokens, segment, places)


def pack_documents(case: Case, rows: Sequence[Sequence[Document]]) -> tuple[Packed, Step, Tensor | None]:
    """(packed inputs, step, packed sources), to be given to the model."""
    inputs = pack([[document.ids for document in row] for row in rows])
    inputs = inputs._replace(tokens=with_images(inputs.tokens, rows))
    if not case.translates:
        return inputs, Step(segment=inputs.segment), None
    sources = pack([[cast(Tensor, document.source) for document in row] for row in rows])
    return inputs, Step(segment=inputs.segment, memory_segment=sources.segment), sources.tokens


def packing(case: Case) -> None:
    """Documents packed into rows equal the documents alone; the influence of the others is exactly 0."""
    for dtype in EXACT:
        with noted(f"in {dtype}"):
            model = rough(case, dtype)
            _packed_equal_alone(case, model)
            with noted("influence of the other documents"):
                _others_have_no_influence(case, model)
            with noted("gradient of the other documents"):
                _others_get_no_gradient(case, model)
            if keeps_state(model):
                _packed_prompt_goes_on(case, model)


def _packed_rows(case: Case) -> list[list[Document]]:
    a, b, c, d, e = case.documents(case, [5, 9, 1, 4, 12], 11)
    return [[a, b, c], [d, e]]


@torch.no_grad()
def _packed_equal_alone(case: Case, model: ModelOp) -> None:
    rows = _packed_rows(case)
    inputs, step, sources = pack_documents(case, rows)
    logits = run(model, inputs.tokens, step, source=sources)
    for document, (row, here) in zip(chain(*rows), inputs.places, strict=True):
        with noted(f"row {row}, tokens {here.start} to {here.stop}"):
            assert_near(logits[row, here], alone(model, document), EXACT[logits.dtype])


@torch.no_grad()
def _others_have_no_influence(case: Case, model: ModelOp) -> None:
    """Other tokens in a neighbour (its source too) leave a document's logits as they are, bit for bit."""
    (a, b, c), second = _packed_rows(case)
    _, changed = case.documents(case, [1, len(b.ids)], 12)  # at b's place, so with a source of b's length
    results = []
    for middle in (b, changed):
        inputs, step, sources = pack_documents(case, [[a, middle, c], second])
        results.append(run(model, inputs.tokens, step, source=sources))
    before, after = results
    for i, (row, here) in enumerate(inputs.places):
        if i == 1:
            assert not torch.equal(before[row, here], after[row, here]), "the change itself was not seen"
        elif case.exact:
            torch.testing.assert_close(after[row, here], before[row, here], atol=0, rtol=0)
        else:
            assert_near(after[row, here], before[row, here], EXACT[before.dtype])


def _others_get_no_gradient(case: Case, model: ModelOp) -> None:
    """The gradient of one document's logits by the embeddings of the others is exactly 0, and its own is not."""
    rows = _packed_rows(case)
    inputs, step, sources = pack_documents(case, rows)
    streams: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Tensor | tuple[Tensor, Step]) -> None:
            stream = result[0] if isinstance(result, tuple) else result
            stream.retain_grad()
            streams[name] = stream

        return hook

    trunks = {name: trunk for name in ("encoder", "decoder") if (trunk := getattr(model, name)) is not None}
    fronts = {name: getattr(trunk.embed, "tokens", None) or trunk.embed for name, trunk in trunks.items()}
    hooks = [front.register_forward_hook(keep(name)) for name, front in fronts.items()]
    logits = run(model, inputs.tokens, step, source=sources)
    for handle in hooks:
        handle.remove()
    row, here = inputs.places[1]
    logits[row, here].square().sum().backward()
    model.zero_grad()
    own = {"inputs": step.segment, "source": step.memory_segment}
    for name, stream in streams.items():
        segment = own["source" if case.translates and name == "encoder" else "inputs"]
        gradient = cast(Tensor, stream.grad)
        assert segment is not None
        mine = torch.zeros_like(segment, dtype=torch.bool)
        mine[row] = segment[row] == NUMBERS[1]
        assert gradient[mine].abs().sum() > 0
        theirs = gradient[~mine]
        bound = 0.0 if case.exact else EXACT[gradient.dtype] * float(gradient.abs().max())
        torch.testing.assert_close(theirs, torch.zeros_like(theirs), atol=bound, rtol=0)


@torch.no_grad()
def _packed_prompt_goes_on(case: Case, model: ModelOp) -> None:
    """Two documents prefilled as one packed prompt: the slot goes on with the second, which the first never meets."""
    a, b = case.documents(case, [6, 11], 13)
    state = State.allocate(model, 2, CAPACITY, CAPACITY if case.translates else 0)
    inputs, step, sources = pack_documents(case, [[a, b.with_ids(b.ids[:5])]])
    slots = torch.tensor([1])
    run(model, inputs.tokens, step.replace(slots=slots), state, source=sources)
    segment = torch.tensor([[NUMBERS[1]]])
    past = [(0, 5)]
    for i in range(5, 11):
        logits = run(model, b.ids[None, i : i + 1], Step(slots=slots, segment=segment), state)
        past.append((i, i + 1))
        expected = with_its_past(model, b, past)[0] if case.length_dependent else alone(model, b)[i]
        assert_near(logits[0, 0], expected, EXACT[logits.dtype])


# --- padding ---


@torch.no_grad()
def padding(case: Case) -> None:
    """Rows padded left, right or around equal the unpadded rows, without a state and with one."""
    for dtype in EXACT:
        model = rough(case, dtype)
        for side in ("left", "right", "around"):
            with noted(f"{side} in {dtype}"):
                _padded_equal_alone(case, model, side)
                if keeps_state(model):
                    _padded_prompts_go_on(case, model, side)


def _padded_equal_alone(case: Case, model: ModelOp, side: Padding) -> None:
    documents = case.documents(case, [9, 5, 12], 14)
    inputs, step, source, where = (case.together or _rows_together)(case, documents, side)
    answers = leaves(run(model, inputs, step, source=source))
    for i, (document, here) in enumerate(zip(documents, where, strict=True)):
        for name, expected in leaves(alone(model, document)).items():
            at = here[name] if isinstance(here, dict) else here
            assert_near(answers[name][i][at], expected, EXACT[expected.dtype])


def _rows_together(case: Case, documents: Sequence[Document], side: Padding) -> Together:
    ids, segment, where = side_by_side([document.ids for document in documents], side)
    source, memory_segment = None, None
    if case.translates:
        source, memory_segment = sources_of(documents, side)
    inputs = with_images(ids, [[document] for document in documents])
    return Together(inputs, Step(segment=segment, memory_segment=memory_segment), source, list(where))


def _padded_prompts_go_on(case: Case, model: ModelOp, side: Padding) -> None:
    """A padded prefill, a padded call in the middle in which one row only waits, then tokens without padding."""
    a, b, c = case.documents(case, [14, 10, 17], 15)
    decoding = Decoding(case, model)
    decoding.feed(Part(a, 3, 0, 6), Part(b, 0, 0, 1), Part(c, 2, 0, 8), pad=side)
    decoding.feed(Part(c, 2, 8, 9), Part(a, 3, 6, 10), Part(b, 0, 1, 1), pad=side)
    decoding.tokens(Part(b, 0, 1, 4), Part(c, 2, 9, 12), Part(a, 3, 10, 13))


# --- kernels ---


def kernels(case: Case) -> None:
    """Every attention kernel that can express the model equals the reference: logits and gradients, whole rows and
    packed ones, and decoding with a state. One that cannot says so with MaskError; at least one other kernel can.

    In fp64 to 1e-10. In fp32 and bfloat16 a whole model magnifies the rounding of each op, by how much depends on its
    weights; so the measure is the reference's own error there, against itself in fp64 on the same weights: another
    kernel may be off by twice as much, in logits and in gradients. Errors are root mean squares over all tensors of a
    kind, each beside its own size: the largest of some thousands differs by a factor of four from one draw of weights
    to the next, and that of one small vector by more than two from one processor to the next.
    """
    others = sorted(KERNELS.keys() - {"reference"})
    compared = set[str]()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = rough(case, dtype)
        expected = _by_kernel(case, deepcopy(model).double(), "reference")
        own = _errors(_by_kernel(case, model, "reference"), expected) if dtype != torch.float64 else {}
        for name in others:
            with noted(f"{name} in {dtype}"):
                try:
                    results = _by_kernel(case, model, name)
                except MaskError:
                    continue
                compared.add(name)
                assert results.keys() == expected.keys()
                for what, value in results.items() if dtype == torch.float64 else ():
                    with noted(what):
                        assert_near(value, expected[what], EXACT[torch.float64])
                found = _errors(results, expected)
                for kind, error in own.items():
                    with noted(kind):
                        assert found[kind] <= 2 * error
    assert compared, "no kernel but the reference can express this model"


def _errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """How far logits, and gradients, are off."""
    kinds = ("logits", "gradient")
    squares = {kind: [_error(found[what], x) ** 2 for what, x in expected.items() if kind in what] for kind in kinds}
    return {kind: (sum(each) / max(len(each), 1)) ** 0.5 for kind, each in squares.items()}


def _error(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to that of what is expected."""
    return float((found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _by_kernel(case: Case, model: ModelOp, kernel: str) -> dict[str, Tensor]:
    """Logits and gradients, by name. Gradients are taken module by module: that of a key's bias is 0 but for rounding
    where scores know no positions, so it has no largest value of its own to compare with."""
    attentions = [module for module in model.modules() if hasattr(module, "kernel")]
    assert attentions
    for module in attentions:
        cast(Any, module).kernel = kernel
    results: dict[str, Tensor] = {}
    calls = [("whole", alone_batch(case))]
    if "packing" not in case.exempt:
        packed, step, sources = pack_documents(case, _packed_rows(case))
        calls.append(("packed", (packed.tokens, step, sources)))
    for name, (inputs, step, source) in calls:
        answers = leaves(run(model, inputs, step, source=source))
        if step.segment is not None:
            answers = {leaf: answer[step.segment != 0] for leaf, answer in answers.items()}
        cast(Tensor, sum(answer.square().mean() for answer in answers.values())).backward()
        several = len(answers) > 1
        results |= {f"{name} logits{f' of {leaf}' * several}": answer.detach() for leaf, answer in answers.items()}
        for path, module in model.named_modules():
            own = [p.grad.flatten() for p in module.parameters(recurse=False) if p.grad is not None]
            if own:
                results[f"{name} gradient of {path}"] = torch.cat(own)
        model.zero_grad()
    if "incremental" not in case.exempt:
        with torch.no_grad():
            results["decoded logits"] = _decoded(case, model)
    for module in attentions:
        cast(Any, module).kernel = "auto"
    return results


def alone_batch(case: Case) -> tuple[Any, Step, Tensor | None]:
    """Two documents of one length as a batch."""
    a, b = case.documents(case, [11, 11], 16)
    if a.source is not None and b.source is not None:
        size = min(len(a.source), len(b.source))
        sources = torch.stack([a.source[:size], b.source[:size]])
        return torch.stack([a.inputs, b.inputs]), Step(), sources
    return pytree.tree_map(lambda *xs: torch.stack(xs), a.inputs, b.inputs), Step(), None


def _decoded(case: Case, model: ModelOp) -> Tensor:
    a, b = case.documents(case, [12, 12], 17)
    state = State.allocate(model, 3, CAPACITY, CAPACITY if case.translates else 0)
    for document, slot, length in ((a, 2, 4), (b, 0, 9)):
        source = None if document.source is None else document.source[None]
        inputs = with_images(document.ids[None, :length], [[document]])
        run(model, inputs, Step(slots=torch.tensor([slot])), state, source=source)
    step = Step(slots=torch.tensor([2, 0]))
    tokens = [torch.stack([a.ids[4 + i], b.ids[9 + i]])[:, None] for i in range(3)]
    return torch.cat([run(model, token, step, state) for token in tokens], 1)


# --- round trip ---


@torch.no_grad()
def round_trip(case: Case) -> None:
    """Saved and loaded, in our layout and in that of Hugging Face: the same spec, parameters and logits, to the bit."""
    assert Model.from_json(case.spec.to_json()) == case.spec
    model = rough(case, torch.float32)
    layouts: tuple[Literal["sublayer", "hf"], ...] = ("sublayer", "hf") if case.hf else ("sublayer",)
    (document,) = case.documents(case, [9], 18)
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder, noted(f"layout {layout}"):
            weights.save(model, folder, layout=layout)
            back = weights.load(folder)
            # A config.json does not say how new weights are drawn.
            assert back.spec.replace(init=case.spec.init) == case.spec
            assert layout == "hf" or back.spec == case.spec
            ours, theirs = dict(model.named_parameters()), dict(back.named_parameters())
            assert ours.keys() == theirs.keys()
            for name, parameter in ours.items():
                assert torch.equal(parameter, theirs[name]), f"{name} changed"
            for name, answer in leaves(alone(model, document)).items():
                assert torch.equal(leaves(alone(back, document))[name], answer)


# --- compile ---


@torch.no_grad()
def compiled(case: Case, backend: str = "eager") -> None:
    """Decoding is one graph: twelve steps from ragged prompts, each equal to the uncompiled forward pass.

    A model without a state is called twice. The cheap backend runs what was traced as it is.
    """
    model = rough(case, torch.float32)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)

    def once(*args: Any, **options: Any) -> Any:
        result = fast(*args, **options)
        assert counter.frame_count == 1, "compiled again"
        return result

    if "incremental" in case.exempt:
        for seed in (19, 20):
            (document,) = case.documents(case, [9], seed)
            assert_near(alone(once, document), alone(model, document), EXACT[torch.float32])
    else:
        a, b, c = case.documents(case, [15, 19, 17], 21)
        decoding = Decoding(case, model)
        for document, slot, length in ((a, 3, 3), (b, 0, 7), (c, 1, 5)):
            decoding.feed(Part(document, slot, 0, length))
        decoding.call = once
        decoding.tokens(Part(a, 3, 3, 15), Part(b, 0, 7, 19), Part(c, 1, 5, 17))


# --- learning ---


def learning(case: Case) -> None:
    """One batch is learned by heart: below 0.05 nats a prediction.

    For language models no token says what follows it: four symbols in random order after a mark (or a source) that
    tells the rows apart, so only what carries the mark along can learn them.
    """
    model = case.spec.build(seed=1).train()
    inputs, step, source, targets = _batch_to_learn(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loss = torch.tensor(torch.inf)
    for _ in range(500):
        result = model(inputs, step, source=source)
        answers, extras = result if isinstance(result, tuple) else (result, {})
        asked = leaves(targets)
        nats = [F.cross_entropy(answer.flatten(0, -2), asked[name].flatten(), reduction="sum")
                for name, answer in leaves(answers).items()]  # fmt: skip
        loss = cast(Tensor, sum(nats)) / sum(target.numel() for target in asked.values())
        if loss < 0.05:
            return
        optimizer.zero_grad()
        (loss + sum(extras.values())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"after 500 steps the loss is {loss.item():.3f} nats a prediction")


def _batch_to_learn(case: Case) -> tuple[Any, Step, Tensor | None, Any]:
    generator = torch.Generator().manual_seed(22)
    if not (case.language_model or case.translates):
        inputs, step, source = alone_batch(case)
        with torch.no_grad():
            logits = run(case.spec.build(), inputs, step, source=source)
            if isinstance(logits, dict):  # not every answer is one that the model can give: a pair's is symmetric
                taught = run(rough(case, torch.float32), inputs, step, source=source)
                return inputs, step, source, {name: answer.argmax(-1) for name, answer in taught.items()}
        targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
        pools = getattr(case.spec.head, "pool", None) is not None  # then a document has one target
        return inputs, step, source, targets[:, :1].expand_as(targets) if pools else targets
    rows, length = 4, 10
    ids = torch.randint(4, (rows, length), generator=generator)
    ids[:, 0] = 5 if case.translates else 5 + torch.arange(rows)
    source = torch.randint(5, 20, (rows, 4), generator=generator) if case.translates else None
    if case.translates and case.documents is not texts:  # frames
        source = sources_of(case.documents(case, [1] * rows, 22), None)[0]
    documents = case.documents(case, [1] * rows, 22) if case.documents is not texts and source is None else []
    if documents:  # the image in front tells the rows apart
        first = torch.cat([document.ids[None] for document in documents])
        return with_images(torch.cat([first, ids[:, 1:-1]], 1), [[one] for one in documents]), Step(), None, ids[:, 1:]
    return ids[:, :-1], Step(), source, ids[:, 1:]


CONTRACTS: dict[str, Callable[[Case], None]] = {
    "incremental": incremental,
    "packing": packing,
    "padding": padding,
    "kernels": kernels,
    "round trip": round_trip,
    "compile": compiled,
    "learning": learning,
}
