"""What the contracts share: a model under test, its documents, and how they are fed and compared.

B batch, L length, M memory length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sublayer.nn.attention import AttentionOp
from sublayer.nn.sublayer import Model, ModelOp
from sublayer.state import PerSlot, State
from sublayer.step import Step

EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}
CAPACITY = 24


@dataclass(frozen=True, eq=False)
class Document:
    """One sequence, without a batch dimension."""

    inputs: Any
    """[L] ids, or the tree of tensors that the model's front end takes."""
    source: Tensor | None = None
    """[M] ids for an encoder-decoder, or [T, F] frames."""

    @property
    def ids(self) -> Tensor:
        """[L]; beside them a document may have "images", whose places are among its first ids."""
        return self.inputs["ids"] if isinstance(self.inputs, dict) else self.inputs

    def with_ids(self, ids: Tensor) -> Document:
        """The same source and images."""
        return replace(self, inputs=self.inputs | {"ids": ids} if isinstance(self.inputs, dict) else ids)


def with_images(ids: Tensor, rows: Sequence[Sequence[Document]]) -> Any:
    """ids [B, L] as the model takes them: beside the images of each row's documents, where they have any."""
    if not isinstance(rows[0][0].inputs, dict):
        return ids
    images = [torch.cat([document.inputs["images"] for document in row]) for row in rows]
    return {"ids": ids, "images": nn.utils.rnn.pad_sequence(images, batch_first=True)}


def texts(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """Random ids, with sources of various lengths for an encoder-decoder."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(cast(int, case.spec.vocab), (length,), generator=generator)

    sources = (3, 7, 5, 1, 4)
    return [Document(ids(n), ids(sources[i % 5]) if case.translates else None) for i, n in enumerate(lengths)]


Padding = Literal["left", "right", "around"]


class Together(NamedTuple):
    """Documents side by side, padded."""

    inputs: Any
    step: Step
    source: Tensor | None
    where: list[Any]
    """Of each document: where its answers lie in its row (for an answer that is a dict: in each of its leaves)."""


@dataclass(frozen=True)
class Case:
    """A tiny model, and what a contract has to know about it."""

    name: str
    spec: Model
    exempt: Mapping[str, str] = field(default_factory=dict[str, str])
    """Contracts without meaning for it, each with the reason."""
    hf: bool = False
    """Whether a Hugging Face class expresses it: the round trip then goes through that layout too."""
    length_dependent: bool = False
    """Frequencies depend on the document's length (DynamicNtk, LongRope): a token is computed as part of the document
    as long as it is then, and never again. So incremental decoding is held against `with_its_past`."""
    exact: bool = True
    """Whether other documents of a packed row have an influence of exactly 0; False: of at most rounding."""
    documents: Callable[[Case, Sequence[int], int], list[Document]] = texts
    """(case, lengths, seed) → documents."""
    together: Callable[[Case, Sequence[Document], Padding], Together] | None = None
    """(case, documents, side) → the padded batch, for inputs that are no rows of ids."""

    @property
    def translates(self) -> bool:
        return self.spec.encoder is not None and self.spec.decoder is not None

    @property
    def language_model(self) -> bool:
        return self.spec.encoder is None and self.spec.vocab is not None and self.spec.head is not None


def rough(case: Case, dtype: torch.dtype = torch.float64) -> ModelOp:
    """The case's model in evaluation mode, with weights that `roughen` chose."""
    model = case.spec.build(dtype=torch.float64)
    roughen(model)
    return model.to(dtype).eval()


@torch.no_grad()
def roughen(model: nn.Module, seed: int = 0) -> None:
    """Weights under which faults show.

    As initialised, scores are near 0 and attention nearly uniform, so a wrong mask, position or key moves the logits
    by less than a tolerance; norms of exactly 1 and biases of exactly 0 hide one that is swapped or forgotten. So
    matrices amplify (scores of heads then spread by about 2), embeddings have norm sqrt(D), vectors move by 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        elif id(parameter) in tables:
            parameter.copy_(noise)
        else:
            parameter.copy_(1.5 * noise / parameter[0].numel() ** 0.5)
    for op in model.modules():
        if isinstance(op, AttentionOp):  # T5 scales no scores, and queries make up for it
            op.q.weight.mul_(op.head_size**-0.5 / op.scale)


def assert_near(actual: Any, expected: Any, tolerance: float) -> None:
    """Equal up to tolerance × the largest absolute value of what is expected, which must be finite. Of dicts, each
    leaf."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, leaf in expected.items():
            with noted(name):
                assert_near(actual[name], leaf, tolerance)
        return
    torch.testing.assert_close(actual, expected, atol=tolerance * largest(expected), rtol=0)


def run(model: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The model's answer, a tensor or a dict of them, without auxiliary losses."""
    result = model(*args, **options)
    return result[0] if isinstance(result, tuple) else result


def alone(model: Callable[..., Any], document: Document, step: Step | None = None) -> Any:
    """[L, V]: the document by itself, in one call; or a dict of answers."""
    source = None if document.source is None else document.source[None]
    answer = run(model, pytree.tree_map(lambda x: x[None], document.inputs), step, source=source)
    return pytree.tree_map(lambda x: x[0], answer)


def leaves(answer: Any) -> dict[str, Tensor]:
    """The tensors of an answer, by name."""
    return answer if isinstance(answer, dict) else {"logits": answer}


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds to a failure what was being looked at."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def keeps_state(model: ModelOp) -> bool:
    return bool(State.allocate(model, 1, 1, 1).store.tensors)


def side_by_side(rows: Sequence[Tensor], pad: Padding | None) -> tuple[Tensor, Tensor | None, list[slice]]:
    """([B, L], segment or None, where each row's tokens lie); padded, even the longest row has some padding."""
    if pad is None:
        return torch.stack(list(rows)), None, [slice(0, len(row)) for row in rows]
    length = max(map(len, rows)) + 2
    tokens = torch.arange(length).repeat(len(rows), 1) % 7  # what stands at padding: arbitrary tokens
    segment = torch.zeros(len(rows), length, dtype=torch.long)
    where: list[slice] = []
    for i, row in enumerate(rows):
        room = length - len(row)
        start = {"left": room, "right": 0, "around": room // 2}[pad]
        where.append(slice(start, start + len(row)))
        tokens[i, where[-1]], segment[i, where[-1]] = row, 1
    return tokens, segment, where


def sources_of(documents: Sequence[Document], pad: Padding | None) -> tuple[Tensor, Tensor | None]:
    """(sources [B, M], memory_segment); frames, which are all of one length, are not padded."""
    sources = [cast(Tensor, document.source) for document in documents]
    return side_by_side(sources, None if sources[0].is_floating_point() else pad)[:2]


class Part(NamedTuple):
    """Tokens start … stop of a document, for a slot."""

    document: Document
    slot: int
    start: int
    stop: int


class Decoding:
    """Documents fed to the slots of a state part by part; every call is held against the documents alone."""

    def __init__(self, case: Case, model: ModelOp, slots: int = 4, call: Callable[..., Any] | None = None) -> None:
        self.case, self.model = case, model
        self.call = model if call is None else call
        self.state = State.allocate(model, slots, CAPACITY, CAPACITY if case.translates else 0)
        self.past: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(slots)}
        self.recurrent = any(isinstance(leaf, PerSlot) for leaf in self.state.store.declared.values())

    def feed(self, *parts: Part, pad: Padding | None = None, implicit: bool = False) -> None:
        """One call. The first part of a document brings its source; later ones find it in the state.

        implicit: the parts are for slots 0, 1, … and Step.slots is left out.
        """
        ids, segment, where = side_by_side([part.document.ids[part.start : part.stop] for part in parts], pad)
        inputs = (
            with_images(ids, [[part.document] for part in parts]) if any(part.start == 0 for part in parts) else ids
        )
        source, memory_segment = None, None
        if self.case.translates and all(part.start == 0 for part in parts):
            source, memory_segment = sources_of([part.document for part in parts], pad)
        slots = None if implicit else torch.tensor([part.slot for part in parts])
        step = Step(slots=slots, segment=segment, memory_segment=memory_segment)
        logits = run(self.call, inputs, step, self.state, source=source)
        tolerance = EXACT[logits.dtype]
        for part, row, tokens in zip(parts, logits, where, strict=True):
            if part.start == part.stop:
                continue
            self.past[part.slot].append((part.start, part.stop))
            with noted(f"slot {part.slot}, tokens {part.start} to {part.stop} of {len(part.document.ids)}"):
                assert_near(row[tokens], self.expected(part), tolerance)

    def tokens(self, *rest: Part, implicit: bool = False) -> None:
        """Feeds parts of equal lengths together, one token a call."""
        for i in range(rest[0].stop - rest[0].start):
            self.feed(*(Part(p.document, p.slot, p.start + i, p.start + i + 1) for p in rest), implicit=implicit)

    def expected(self, part: Part) -> Tensor:
        if self.case.length_dependent:
            return with_its_past(self.model, part.document, self.past[part.slot])
        return alone(self.model, part.document)[part.start : part.stop]

    def fork(self, src: int, dst: int, length: int | None = None) -> None:
        self.state.fork(src, dst, length)
        self.past[dst] = list(self.past[src])

    def reorder(self, slots: Sequence[int]) -> None:
        self.state.reorder(slots)
        self.past |= {slot: list(self.past[source]) for slot, source in enumerate(slots)}

    def reset(self, slot: int) -> None:
        self.state.reset([slot])
        self.past[slot] = []


def with_its_past(model: ModelOp, document: Document, calls: Sequence[tuple[int, int]]) -> Tensor:
    """Logits of the last of some calls (start, stop), by forward passes without a state.

    Each call is a forward pass over the whole prefix that ends with it, in which every block is handed, for older
    tokens, the vectors that the earlier calls gave it. Equal to the plain forward where no length matters.
    """
    assert model.decoder is not None
    past: dict[str, Tensor] = {}
    logits = torch.empty(0)
    for start, stop in calls:

        def meet(name: str, start: int) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                x = args[0] if start == 0 else torch.cat([past[name][:, :start], args[0][:, start:]], 1)
                past[name] = x
                return (x, *args[1:])

            return hook

        hooks = [
            block.register_forward_pre_hook(meet(name, start)) for name, block in model.decoder.blocks.named_children()
        ]
        logits = run(model, document.inputs[None, :stop])[0, start:]
        for handle in hooks:
            handle.remove()
    return logits


def largest(x: Tensor) -> float:
    assert x.isfinite().all(), "the reference itself is not finite"
    return float(x.detach().abs().max())
