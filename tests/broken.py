"""Faults on purpose, of kinds that this field has shipped, each put into the running code for a moment.

The contract named has to fail, or it would not see the fault in earnest either. `unseen` are contracts that let it
pass, for both sides of their comparison share it: that is why none of them stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sublayer.names import Change, Row
from sublayer.nn import geometry, head, mamba, s4
from sublayer.nn.additive import AdditiveOp
from sublayer.nn.attend import KERNELS
from sublayer.nn.attention import AttentionOp
from sublayer.nn.convolution import ShortConvolutionOp
from sublayer.nn.delta import GatedDeltaOp
from sublayer.nn.documents import Documents
from sublayer.nn.embed import EmbedOp
from sublayer.nn.experts import ExpertsOp
from sublayer.nn.frames import FramesOp
from sublayer.nn.gated_convolution import GatedConvolutionOp
from sublayer.nn.latent import LatentAttentionOp
from sublayer.nn.linear_attention import LinearAttentionOp
from sublayer.nn.mamba import MambaOp
from sublayer.nn.mask import Layout, Mask
from sublayer.nn.moe import MoEOp, Routing
from sublayer.nn.norm import RMSNormOp
from sublayer.nn.op import Op
from sublayer.nn.pairs import AxialAttentionOp, OuterProductMeanOp, TriangleMultiplicationOp
from sublayer.nn.patches import PatchesOp
from sublayer.nn.position import T5BucketsOp
from sublayer.nn.recurrent import ReaderOp
from sublayer.nn.reference import Options
from sublayer.nn.rope import Rope
from sublayer.recipes import family
from sublayer.recipes.actions import ImagesAndTokensOp
from sublayer.recipes.deberta import Neighbours
from sublayer.recipes.multiscale import PatchedBytesOp
from sublayer.state import Handle, PerMemory, PerSlot, PerToken, State
from sublayer.step import Place, Step


@dataclass(frozen=True)
class Broken:
    """A fault, the case in which it matters, and the contract that has to see it."""

    name: str
    case: str
    contract: str
    fault: Callable[[], AbstractContextManager[Any]]
    where: str = ""
    """What the failure has to say it was looking at."""
    unseen: tuple[str, ...] = ()


def around(cls: Any, method: str, changed: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """cls.method(self, …) becomes changed(original, self, …); cls may be a module, and self the first argument."""
    original = getattr(cls, method)

    def replaced(self: Any, *args: Any, **options: Any) -> Any:
        return changed(original, self, *args, **options)

    return lambda: patch.object(cls, method, replaced)


# --- masks and kernels ---


def all_is_present(forward: Any, op: Op, x: dict[str, Tensor], step: Step, state: State | None = None) -> Any:
    return forward(op, {name: leaf for name, leaf in x.items() if name != "present"}, step.replace(segment=None))


def cells_of_the_call(known: Any, op: PatchedBytesOp, ids: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    known(op, ids, *args)
    return torch.arange(ids.shape[1]).expand_as(ids), ids


def counted_over_documents(read: Any, op: PatchedBytesOp, known: Tensor, cell: Tensor, pos: Tensor) -> Tensor:
    return read(op, known, cell, cell + 0 * pos)


def widened(window: int | None) -> int | None:
    return None if window is None else window + 1


def window_plus_one(tokens: Any, op: AttentionOp, *args: Any) -> tuple[Tensor, Tensor, Mask]:
    k, v, mask = tokens(op, *args)
    return k, v, replace(mask, window=widened(mask.window))


def not_causal(tokens: Any, op: AttentionOp, *args: Any) -> tuple[Tensor, Tensor, Mask]:
    k, v, mask = tokens(op, *args)
    return k, v, replace(mask, causal=False)


def kernel(change: Callable[[Tensor, Tensor, Tensor, Mask, Options], tuple[Any, ...]]) -> Callable[[], Any]:
    """The sdpa kernel computes something else."""
    sdpa = KERNELS["sdpa"]
    return lambda: patch.dict(KERNELS, sdpa=lambda *call: sdpa(*change(*call)))


def window_plus_one_in_a_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> tuple[Any, ...]:
    return q, k, v, replace(mask, window=widened(mask.window)), options


def no_gradient_of_values(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> tuple[Any, ...]:
    return q, k, v.detach(), mask, options


def no_gradient_of_the_bias(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> tuple[Any, ...]:
    assert options.bias is not None
    return q, k, v, mask, options._replace(bias=options.bias.detach())


def values_of_the_wrong_group(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> tuple[Any, ...]:
    return q, k, v.flip(1), mask, options


def one_document(
    q_pos: Tensor | None, k_pos: Tensor | None, q: Tensor | None = None, k: Tensor | None = None, clean: bool = False
) -> Layout:
    """Padding stays hidden, but documents of a row see each other."""
    q, k = (None if segment is None else (segment != 0).long() for segment in (q, k))
    return Layout(q_pos, k_pos, q, k, clean=clean)


def leaks(forward: Any, op: AttentionOp, x: Tensor, step: Step, state: State | None = None) -> Tensor:
    """A mask of large negative scores in place of −∞, say."""
    return forward(op, x, step, state) + 1e-13 * x.detach().mean(1, keepdim=True)


# --- positions ---


def rope_one_too_far(tables: Any, rope: Rope, pos: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """While decoding, a token counts itself before it asks for its position."""
    return tables(rope, pos + 1 if pos.shape[1] == 1 else pos, *args, **options)


def queries_from_zero(bias: Any, op: T5BucketsOp, q_pos: Tensor, k_pos: Tensor, *args: Any) -> Tensor:
    """The bias of a call's queries, as if nothing were in the cache."""
    return bias(op, q_pos - q_pos[:, :1], k_pos, *args)


def kept_of_this_call_alone(tokens: Any, op: AttentionOp, x: Tensor, step: Step, *rest: Any) -> tuple[Any, ...]:
    """A layer leaves to later ones the values of the new tokens, and not those of its state."""
    k, v, mask = tokens(op, x, step, *rest)
    if op.spec.keeps is not None and step.shared is not None:
        old = v.shape[1] - x.shape[1]
        step.shared.kept[op.spec.keeps] = (k, torch.cat([torch.zeros_like(v[:, :old]), v[:, old:]], 1))
    return k, v, mask


# --- state ---


def one_cell_off(write: Any, handle: Handle, value: Tensor, step: Step) -> None:
    """A call's keys are written in the wrong order."""
    write(handle, value.roll(1, 1) if isinstance(handle.leaf, PerToken) else value, step)


def only_keys_and_values_move(reorder: Any, state: State, slots: list[int]) -> None:
    """Beam search before it knew of recurrences."""
    kept = {name: tensor.clone() for name, tensor in state.store.tensors.items() if _is(state, name, PerSlot)}
    reorder(state, slots)
    for name, tensor in kept.items():
        state.store.tensors[name].copy_(tensor)


def the_other_way(reorder: Any, state: State, slots: list[int]) -> None:
    """Slot slots[i] becomes a copy of slot i."""
    order = list(range(len(slots)))
    for i, slot in enumerate(slots):
        order[slot] = i
    reorder(state, order)


def fork_without(kind: type) -> Callable[..., None]:
    def fork(original: Any, state: State, src: int, dst: int, length: int | None = None) -> None:
        kept = {name: tensor[dst].clone() for name, tensor in state.store.tensors.items() if _is(state, name, kind)}
        original(state, src, dst, length)
        for name, tensor in kept.items():
            state.store.tensors[name][dst] = tensor

    return fork


def recurrence_not_restored(truncate: Any, state: State, slots: Any, length: Any, snapshot: Any = None) -> None:
    """Only the length goes back."""
    leaves = {name: state.store.tensors[name][slots].clone().nan_to_num() for name in snapshot.leaves}
    truncate(state, slots, length, replace(snapshot, leaves=leaves))


def length_only(reset: Any, state: State, slots: list[int]) -> None:
    """The slot counts as empty, and what was in it stays."""
    state.store.length[slots] = 0


def never_cleared(clear: Any, state: State, rows: list[int], lengths: list[int]) -> None:
    pass


def _is(state: State, name: str, kind: type) -> bool:
    return isinstance(state.store.declared[name], kind)


# --- padding and packing in recurrences, and in the state ---


def without_starts(forward: Any, op: Op, x: Tensor, step: Step, state: State | None = None) -> Tensor:
    assert step.shared is not None
    return forward(op, x, step.replace(shared=replace(step.shared, starts=None)), state)


def moved_by_padding(forward: Any, op: Op, x: Tensor, step: Step, state: State | None = None) -> Tensor:
    return forward(op, x, step.replace(segment=None), state)


@contextmanager
def padding_written() -> Iterator[None]:
    """Padding takes cells of the state as tokens do, and is seen there."""
    place, note = State.place, State.note

    def everything(state: State, step: Step, batch: int, tokens: int) -> Place:
        return place(state, step.replace(segment=None), batch, tokens)

    def visible(state: State, where: Place, pos: Tensor, document: Tensor) -> None:
        note(state, where, pos, document.clamp(min=1))

    with patch.object(State, "place", everything), patch.object(State, "note", visible):
        yield


def one_document_a_row(of: Any, segment: Tensor) -> Any:
    """A row's documents are read as one."""
    return of((segment != 0).long())


def forgets(advanced: Any, power: Any, x: Tensor, steps: Tensor) -> Tensor:
    """A prefilled call leaves what its own tokens wrote, and nothing of the calls before."""
    return 0 * advanced(power, x, steps)


def all_of_the_memory(cross: Any, step: Step, *args: Any) -> None:
    """Cross-attention sees the source's padding."""


def reads_padding(forward: Any, op: ReaderOp, ids: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Where the encoder ends is where its padding ends."""
    return forward(op, ids, step.replace(segment=None))


def one_answer_a_row(numbers: Any, segment: Tensor) -> Tensor:
    """A head pools all that a row holds but its padding."""
    return (segment != 0).long()


def pools_padding(pool: Any, x: Tensor, step: Step, how: str) -> tuple[Tensor, Tensor | None]:
    """The first token is the first cell."""
    return pool(x, None, how)


# --- experts ---


def one_row_off(forward: Any, op: ExpertsOp, rows: Tensor, ends: Tensor) -> Tensor:
    """The first row of an expert goes to the one before it."""
    return forward(op, rows, (ends + 1).clamp(max=len(rows)))


def choices_of_the_first(route: Any, op: MoEOp, x: Tensor, step: Step) -> Routing:
    """Every token of a row goes where its first one goes."""
    routing = route(op, x, step)
    return routing._replace(chosen=routing.chosen[:, :1].expand_as(routing.chosen))


def over_the_edge(forward: Any, op: Neighbours, x: Tensor, step: Step, state: State | None = None) -> Tensor:
    """The convolution of a document's last token sees what lies behind it."""
    return forward(op, x, step.replace(segment=None), state)


def scaled_by_the_latent(absorbed: Any, op: LatentAttentionOp, content: Tensor, turning: Tensor, *rest: Any) -> Tensor:
    """Scores in the latent are divided by the root of its size."""
    wrong = (turning.shape[-1] + content.shape[-1]) / (turning.shape[-1] + op.spec.latent)
    return absorbed(op, content * wrong**0.5, turning * wrong**0.5, *rest)


def hears_its_neighbours(forward: Any, op: FramesOp, frames: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Frames are centred over the batch."""
    return forward(op, frames - frames.mean(0), step)


def reads_its_own_table(forward: Any, op: EmbedOp, ids: Tensor, step: Step, shared: Tensor | None = None) -> Any:
    """The shared table is read some rows too far, by how many depends on the source."""
    return forward(op, ids, step, None if shared is None else shared.roll(ids.shape[1], 0))


# --- the rest ---


def counts_its_calls(forward: Any, op: Any, *args: Any) -> Tensor:
    """A Python number that changes from call to call."""
    op.calls = getattr(op, "calls", 0) + 1
    return forward(op, *args) * (1 + 0 * op.calls)


def exported_in_another_order() -> AbstractContextManager[Any]:
    """A table whose way back is not the inverse of its way in: k, q, v."""

    def change(row: Row) -> Row:
        if "c_attn" not in row.their_names[0]:
            return row
        return replace(row, change=Change(row.change.into, lambda ours: row.change.back([ours[i] for i in (1, 0, 2)])))

    module = family("gpt2")
    return patch.object(module, "NAMES", [change(row) for row in module.NAMES])


def shift_and_scale_exchanged() -> AbstractContextManager[Any]:
    """The same in a table that depends on the spec: what adaLN draws is written as scale, shift, gate."""
    module = family("dit")
    table = module.NAMES

    def changed(model: Any) -> list[Row]:
        def change(row: Row) -> Row:
            if len(row.our_names) != 6:
                return row
            order = (1, 0, 2, 3, 4, 5)
            return replace(row, change=Change(row.change.into, lambda ours: row.change.back([ours[i] for i in order])))

        return [change(row) for row in table(model)]

    return patch.object(module, "NAMES", changed)


def rounded_when_saved() -> AbstractContextManager[Any]:
    module = import_module("sublayer.weights.save")
    write = module.stream_tensors

    def rounded(path: Any, kinds: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        write(path, kinds, ((name, tensor.bfloat16().to(tensor.dtype)) for name, tensor in tensors))

    return patch.object(module, "stream_tensors", rounded)


def blank(taken: Any, op: PatchesOp, inputs: Any) -> tuple[Tensor, Tensor | None]:
    images, hidden = taken(op, inputs)
    return images * 0, hidden


def in_another_order(forward: Any, op: ImagesAndTokensOp, inputs: Any, step: Step, *args: Any) -> Any:
    """The images of a row come last first."""
    if isinstance(inputs, dict) and inputs["images"].dim() == 5:
        inputs = inputs | {"images": inputs["images"].flip(1)}
    return forward(op, inputs, step, *args)


def says_nothing(forward: Any, op: AttentionOp, x: Tensor, *args: Any) -> Tensor:
    return x * 0


def joined_documents(ssd: Any, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan is not told where documents start."""
    return ssd(x, *args[:-1], None)


ATTENTION, SCAN, WRITER = (AttentionOp, "_tokens"), (MambaOp, "forward"), (AdditiveOp, "forward")
SHORT, DELTA = (ShortConvolutionOp, "forward"), (GatedDeltaOp, "forward")
LINEAR = (LinearAttentionOp, "forward")
WINDOW = "llama, windows"

BROKEN = (
    Broken("a window too wide by one in one kernel", WINDOW, "kernels",
           kernel(window_plus_one_in_a_kernel), where="whole logits", unseen=("incremental", "packing", "padding")),
    Broken("no gradient to the values in one kernel", "gpt2", "kernels", kernel(no_gradient_of_values),
           where="sdpa", unseen=("incremental",)),
    Broken("no gradient to the bias in one kernel", "deberta", "kernels", kernel(no_gradient_of_the_bias),
           where="sdpa", unseen=("packing", "padding")),
    Broken("values of the wrong group in one kernel", "llama", "kernels", kernel(values_of_the_wrong_group),
           where="whole logits", unseen=("incremental", "packing")),
    Broken("patches of bytes forget those of earlier calls", "multiscale", "incremental",
           around(PatchedBytesOp, "_known", cells_of_the_call), where="token_by_token"),
    Broken("a patch reads the document before", "multiscale", "packing",
           around(PatchedBytesOp, "_read", counted_over_documents), where="row 0", unseen=("incremental",)),
    Broken("no causal mask", "llama", "incremental", around(*ATTENTION, not_causal),
           where="token_by_token", unseen=("kernels",)),
    Broken("layers that share values read those of the call alone", "gemma4", "incremental",
           around(*ATTENTION, kept_of_this_call_alone), where="token_by_token"),
    Broken("latent attention decodes with another scale", "deepseek_v3", "incremental",
           around(LatentAttentionOp, "_absorbed", scaled_by_the_latent), where="token_by_token",
           unseen=("kernels", "round trip")),
    Broken("documents see each other", "gpt2", "packing",
           lambda: patch.object(geometry, "Layout", one_document), where="row 0", unseen=("incremental", "padding")),
    Broken("documents leak by less than any tolerance", "gpt2", "packing", around(AttentionOp, "forward", leaks),
           where="influence", unseen=("padding", "kernels")),
    Broken("rope off by one while decoding", "llama", "incremental", around(Rope, "tables", rope_one_too_far),
           where="chunked", unseen=("kernels",)),
    Broken("T5's bias ignores the cache's offset", "t5", "incremental",
           around(T5BucketsOp, "forward", queries_from_zero), where="token_by_token"),
    Broken("keys written to the wrong cells", "llama", "incremental", around(Handle, "write", one_cell_off),
           where="chunked", unseen=("kernels",)),
    Broken("reorder forgets recurrences", "mamba", "incremental",
           around(State, "reorder", only_keys_and_values_move), where="reordered", unseen=("packing", "padding")),
    Broken("reorder the other way round", "gpt2", "incremental", around(State, "reorder", the_other_way),
           where="reordered"),
    Broken("fork forgets recurrences", "mamba", "incremental", around(State, "fork", fork_without(PerSlot)),
           where="forked"),
    Broken("fork forgets the memory", "t5", "incremental", around(State, "fork", fork_without(PerMemory)),
           where="forked"),
    Broken("truncate restores no recurrence", "mamba", "incremental",
           around(State, "truncate", recurrence_not_restored), where="truncated"),
    Broken("a stale slot keeps its NaN", "gpt2", "incremental", around(State, "reset", length_only), where="reset"),
    Broken("cut cells keep their NaN", "llama", "incremental", around(State, "_clear", never_cleared),
           where="truncated"),
    Broken("no reset where a document starts", "mamba", "packing", around(*SCAN, without_starts),
           where="row 0", unseen=("incremental", "padding")),
    Broken("a recurrence's kernel reads on where a document starts", "rnn", "packing",
           around(Documents, "of", one_document_a_row), where="row 0", unseen=("incremental", "padding")),
    Broken("a convolution reads over documents", "convolution", "packing",
           around(GatedConvolutionOp, "forward", without_starts), where="row 0", unseen=("incremental", "padding")),
    Broken("no new beginning where a document starts", "seq2seq", "packing", around(*WRITER, without_starts),
           where="row 0"),
    Broken("linear attention sums over documents", "linear_transformer", "packing", around(*LINEAR, without_starts),
           where="row 0", unseen=("incremental", "padding")),
    Broken("padding enters linear attention's sums", "linear_transformer", "padding", around(*LINEAR, moved_by_padding),
           where="left", unseen=("incremental",)),
    Broken("the delta rule remembers over documents", "qwen3_next", "packing", around(*DELTA, without_starts),
           where="row 0", unseen=("incremental", "padding")),
    Broken("padding fades the delta rule's memory", "qwen3_next", "padding", around(*DELTA, moved_by_padding),
           where="left", unseen=("incremental",)),
    Broken("a state space convolves over documents", "s4", "packing", around(Documents, "of", one_document_a_row),
           where="row 0", unseen=("incremental", "padding")),
    Broken("a state space forgets what earlier calls left", "s4", "incremental", around(s4, "_advanced", forgets),
           where="chunked", unseen=("packing",)),
    Broken("a short convolution reads on where a document starts", "mamba2", "packing",
           around(*SHORT, without_starts), where="row 0", unseen=("incremental", "padding")),
    Broken("a short convolution counts padding", "mamba2", "padding", around(*SHORT, moved_by_padding),
           where="left", unseen=("incremental",)),
    Broken("chunks of Mamba-2 join documents", "mamba2", "packing", around(mamba, "ssd", joined_documents),
           where="row 0", unseen=("incremental", "padding")),
    Broken("padding moves a recurrence", "mamba", "padding", around(*SCAN, moved_by_padding),
           where="left", unseen=("incremental",)),
    Broken("padding is written", "llama", "padding", padding_written, where="slot 3", unseen=("incremental",)),
    Broken("the source's padding is seen", "t5", "padding", around(geometry, "_cross", all_of_the_memory),
           where="left"),
    Broken("the decoder starts from the source's padding", "seq2seq", "padding",
           around(ReaderOp, "forward", reads_padding), where="left", unseen=("incremental",)),
    Broken("a row's documents are pooled together", "bert, classes of documents", "packing",
           around(head, "_numbers", one_answer_a_row), where="row 0", unseen=("padding",)),
    Broken("padding is pooled", "bert, classes of documents", "padding", around(head, "pool", pools_padding),
           where="left"),
    Broken("experts get each other's rows", "mixtral", "packing", around(ExpertsOp, "forward", one_row_off),
           where="row", unseen=("round trip",)),
    Broken("a row's tokens share their experts", "mixtral", "incremental", around(MoEOp, "route", choices_of_the_first),
           where="token_by_token"),
    Broken("a convolution reaches into the next document", "deberta, convolved", "packing",
           around(Neighbours, "forward", over_the_edge), where="row 0"),
    Broken("a recording is moved by its neighbours", "whisper", "padding",
           around(FramesOp, "forward", hears_its_neighbours), where="left"),
    Broken("a shared table depends on the length of its source", "t5", "padding",
           around(EmbedOp, "forward", reads_its_own_table), where="left"),
    Broken("a Python number changes from call to call", "llama", "compile",
           around(RMSNormOp, "forward", counts_its_calls)),
    Broken("export is not the inverse of import", "gpt2", "round trip", exported_in_another_order, where="hf"),
    Broken("adaptive shifts and scales are exchanged by the export", "dit", "round trip", shift_and_scale_exchanged,
           where="hf", unseen=("kernels",)),
    *(Broken(f"padding of an alignment is read by {op.__name__}", "evoformer", "padding",
             around(op, "forward", all_is_present), where="left", unseen=("kernels", "round trip"))
      for op in (AxialAttentionOp, OuterProductMeanOp, TriangleMultiplicationOp)),
    Broken("images are blank", "vit", "learning", around(PatchesOp, "_taken", blank), unseen=("round trip", "compile")),
    Broken("images are given to the wrong documents", "actions", "packing",
           around(ImagesAndTokensOp, "forward", in_another_order), where="row 0", unseen=("padding", "learning")),
    Broken("weights are rounded when saved", "llama", "round trip", rounded_when_saved, where="sublayer"),
    Broken("attention says nothing", "gpt2", "learning", around(AttentionOp, "forward", says_nothing),
           unseen=("incremental", "packing", "padding", "round trip")),
)  # fmt: skip
