"""State: all that decoding remembers, allocated from what the ops declare. An op never allocates state.

Storage is dense: a leaf PerToken is [slots, length, …], PerSlot [slots, …], PerMemory [slots, memory length, …].
A token lies at cell `length + i` of its slot, whatever its position is. Cells that hold no token hold zeros: freed
cells are cleared, so no stale NaN can reach an attention kernel. (A call that breaks off midway leaves its own cells
written: `reset` the slot, or go on with the same tokens.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import StateError, nearest
from .files import read_tensors, replacing, write_tensors
from .step import Place, Step

Slots = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class Leaf:
    """What an op declares that it keeps: the shape of one cell, and its dtype (None: the dtype of the state)."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PerToken(Leaf):
    """One cell a token, as keys and values are; `window` is how many of the newest cells the op can still need."""

    window: int | None = None


@dataclass(frozen=True)
class PerSlot(Leaf):
    """One cell a slot, as the hidden state of a recurrence is."""


@dataclass(frozen=True)
class PerMemory(Leaf):
    """One cell a memory vector, as the keys and values of cross-attention are; written once, then only read."""


@dataclass(eq=False)
class Snapshot:
    """What cannot be cut back by length alone: the PerSlot leaves of some slots, and their lengths."""

    slots: list[int]
    length: list[int]
    leaves: dict[str, Tensor]


@dataclass(eq=False)
class Handle:
    """One leaf, as its op sees it: read and write by the step that is going on."""

    tensor: Tensor
    leaf: Leaf

    def read(self, step: Step) -> Tensor:
        """PerToken [B, M, …], PerSlot [B, …], PerMemory [B, M', …] of the step's rows; a view of neighbouring slots.

        M is what the longest row uses, in eager mode, and the whole capacity when compiling.
        """
        place = _place(step)
        tensor = self.tensor
        if isinstance(self.leaf, PerToken):
            tensor = tensor[:, : place.used]
        elif isinstance(self.leaf, PerMemory):
            tensor = tensor[:, : place.memory_used]
        return tensor[place.rows]

    def write(self, value: Tensor, step: Step) -> None:
        """Stores PerToken [B, L, …] at the step's new cells (padding is not written), PerSlot [B, …],
        PerMemory [B, M', …] with the rest of the row cleared."""
        place = _place(step)
        if isinstance(self.leaf, PerToken):
            _write_tokens(self.tensor, value, place)
        elif isinstance(self.leaf, PerMemory):
            if value.shape[1] > self.tensor.shape[1]:
                room = self.tensor.shape[1]
                raise StateError(f"memory of {value.shape[1]} vectors does not fit memory_length={room} of the state")
            self.tensor[place.rows] = nn.functional.pad(
                value, (0, 0) * (value.dim() - 2) + (0, self.tensor.shape[1] - value.shape[1])
            ).to(self.tensor.dtype)
        else:
            self.tensor[place.rows] = value.to(self.tensor.dtype)


def _place(step: Step) -> Place:
    if step.shared is None or step.shared.place is None:
        raise StateError("a state is read or written only inside a model's forward pass (Step.shared is not set)")
    return step.shared.place


def _write_tokens(tensor: Tensor, value: Tensor, place: Place) -> None:
    if isinstance(place.rows, slice):
        tensor = tensor[place.rows]
        if place.start is not None:
            tensor[:, place.start : place.start + value.shape[1]] = value
            return
        rows = torch.arange(tensor.shape[0], device=tensor.device)[:, None]
    else:
        rows = place.rows[:, None]
    value = value.to(tensor.dtype)
    if place.written is not None:
        written = place.written.view(place.written.shape + (1,) * (value.dim() - 2))
        value = torch.where(written, value, tensor[rows, place.index])
    tensor[rows, place.index] = value


@dataclass(eq=False)
class _Store:
    capacity: int
    memory_capacity: int
    dtype: torch.dtype  # of leaves that declare none
    declared: dict[str, Leaf]  # all of the model's; those PerMemory have no tensor where memory_capacity is 0
    tensors: dict[str, Tensor]
    length: Tensor  # [slots] int64: tokens held
    pos: Tensor  # [slots, capacity] int32: each token's position, shared by all layers
    document: Tensor  # [slots, capacity] int32: documents of a slot numbered from 1
    memory_segment: Tensor  # [slots, memory capacity] int32


@dataclass(eq=False)
class State:
    """Decoding state of a model; `at(path)` is the view of one op, whole-state operations act on every leaf."""

    store: _Store
    path: str = field(default="")

    @classmethod
    def allocate(
        cls,
        model: nn.Module,
        slots: int,
        length: int,
        memory_length: int = 0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> State:
        """Zeroed storage for `slots` rows of `length` tokens and `memory_length` memory vectors.

        dtype and device default to those of the model's parameters. `device="meta"` allocates nothing and still
        knows `bytes()`. Raises StateError for sizes below 1.
        """
        if slots < 1 or length < 1 or memory_length < 0:
            raise StateError(f"a state needs slots ≥ 1 and length ≥ 1, got slots={slots}, length={length}")
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        like = next(model.parameters(), torch.empty(0))
        device = torch.device(device) if device is not None else like.device
        modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        declared = {f"{path}.{name}".lstrip("."): leaf for path, op in modules for name, leaf in _declared(op).items()}

        def make(leaf: Leaf) -> Tensor:
            cells = {PerToken: (length,), PerMemory: (memory_length,)}.get(cast(Any, type(leaf)), ())
            kind: Any = {"dtype": leaf.dtype or dtype or like.dtype, "device": device}
            if cells and len(leaf.shape) > 1:
                # In memory a head's cells are neighbours, seen through a view as [slots, length, heads, …]: kernels
                # read head by head. On CPU: 1.1 to 1.9 times as fast with a key head a query head, 0.9 to 1.1 grouped.
                return torch.zeros(slots, leaf.shape[0], *cells, *leaf.shape[1:], **kind).transpose(1, 2)
            return torch.zeros(slots, *cells, *leaf.shape, **kind)

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        made = {n: leaf for n, leaf in declared.items() if memory_length or not isinstance(leaf, PerMemory)}
        try:
            tensors = {name: make(leaf) for name, leaf in made.items()}
        except RuntimeError as error:
            raise StateError(
                f"a state of {slots} slots, {length} tokens and {memory_length} memory vectors cannot be allocated: "
                f"{str(error).splitlines()[0]}"
            ) from None
        return cls(
            _Store(
                length,
                memory_length,
                dtype or like.dtype,
                declared,
                tensors,
                length=numbers(slots, dtype=torch.long),
                pos=numbers(slots, length),
                document=numbers(slots, length),
                memory_segment=numbers(slots, memory_length),
            )
        )

    # --- the view of an op ---

    def at(self, name: str) -> State:
        """The view of a module inside this one, by its attribute name."""
        return State(self.store, f"{self.path}.{name}" if self.path else name)

    def __getitem__(self, name: str) -> Handle:
        path = f"{self.path}.{name}" if self.path else name
        if path not in self.store.tensors:
            if isinstance(self.store.declared.get(path), PerMemory):
                raise StateError(f"the state has no {path}: allocate it with memory_length for a model with memory")
            raise StateError(f"the state has no leaf {path}{nearest(path, self.store.tensors)}")
        return Handle(self.store.tensors[path], self.store.declared[path])

    @property
    def length(self) -> Tensor:
        """[slots] int64: the tokens each slot holds."""
        return self.store.length

    @property
    def memory_segment(self) -> Tensor:
        """[slots, memory length] int32: the documents of the memory; 0 where there is none."""
        return self.store.memory_segment

    # --- one forward pass: where its tokens go ---

    def place(self, step: Step, batch: int, tokens: int) -> Place:
        """Where the `tokens` new tokens of each of `batch` rows will lie.

        Raises StateError, in eager mode, for unknown slots and for rows that would grow past the capacity.
        """
        store, device = self.store, self.store.length.device
        compiling = torch.compiler.is_compiling()
        if step.slots is None:
            if not 0 < batch <= len(store.length):
                raise StateError(f"a batch of {batch} rows does not fit a state of {len(store.length)} slots")
            rows: slice | Tensor = slice(0, batch)
        else:
            if not isinstance(step.slots, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StateError(f"Step.slots is a tensor [B], got {type(step.slots).__name__}")
            if step.slots.shape != (batch,):
                raise StateError(f"Step.slots is {list(step.slots.shape)}, the batch has {batch} rows")
            if step.slots.dtype not in (torch.int64, torch.int32):
                raise StateError(f"Step.slots are whole numbers of slots, got {step.slots.dtype}")
            rows = step.slots if compiling else _neighbours(step.slots, len(store.length))
        start = store.length[rows]
        written = None if step.segment is None else step.segment != 0
        offset = torch.arange(tokens, device=device)
        if written is None:
            count: Tensor | int = tokens
            index = start[:, None] + offset
        else:
            rank = written.long().cumsum(1)
            count = rank[:, -1]
            behind = count[:, None] + offset - rank  # padding is sent to distinct cells behind, and not written
            index = (start[:, None] + torch.where(written, rank - 1, behind)) % store.capacity
        if compiling:
            return Place(rows, index, written, count, None, None, None)
        starts, ends = _ints(start), _ints(start + count)
        for row, end in enumerate(ends):
            if end > store.capacity:
                raise StateError(
                    f"row {row}: {end} tokens do not fit a state of length {store.capacity}; "
                    "allocate a longer state or shorten the prompt"
                )
        if written is not None and tokens > store.capacity:
            raise StateError(
                f"a call of {tokens} tokens, padding included, is longer than the state ({store.capacity})"
            )
        same = starts[0] if written is None and len(set(starts)) == 1 else None
        memory = (store.memory_segment[rows] != 0).any(0).nonzero()
        memory_used = int(memory[-1]) + 1 if len(memory) else 0
        return Place(rows, index, written, count, same, max(ends), memory_used)

    def note(self, place: Place, pos: Tensor, document: Tensor) -> None:
        """Stores the positions and document numbers, [B, L], of the new tokens."""
        _write_tokens(self.store.pos, pos.to(torch.int32), place)
        _write_tokens(self.store.document, document.to(torch.int32), place)

    def last(self, place: Place) -> tuple[Tensor, Tensor]:
        """([B, 1], [B, 1]): the position that the next token of each row would have, and the row's document number."""
        length = self.store.length[place.rows][:, None]
        cell = (length - 1).clamp(min=0)
        pos = self.store.pos[place.rows].gather(1, cell).long()
        document = self.store.document[place.rows].gather(1, cell).long()
        return torch.where(length > 0, pos + 1, 0), torch.where(length > 0, document, 1)

    def keys(self, place: Place) -> tuple[Tensor, Tensor]:
        """([B, M], [B, M]): position and document of every cell after this call's tokens; document 0 where empty."""
        end = self.store.length[place.rows] + place.count
        pos = self.store.pos[:, : place.used][place.rows].long()
        document = self.store.document[:, : place.used][place.rows].long()
        cells = torch.arange(pos.shape[1], device=pos.device)
        return pos, torch.where(cells < end[:, None], document, 0)

    def remember(self, memory_segment: Tensor, place: Place) -> None:
        """Keeps the documents of a new memory, [B, M], beside its keys and values."""
        room = self.store.memory_segment.shape[1] - memory_segment.shape[1]
        if room < 0:
            raise StateError(
                f"memory of {memory_segment.shape[1]} vectors does not fit memory_length="
                f"{self.store.memory_segment.shape[1]} of the state"
            )
        self.store.memory_segment[place.rows] = nn.functional.pad(memory_segment, (0, room)).to(torch.int32)

    def advance(self, place: Place) -> None:
        """Counts the tokens of a finished call; called once a forward pass, by the model.

        Gradients reach back to this call's tokens, not to those of earlier calls.
        """
        self.store.length[place.rows] += place.count
        for name, tensor in self.store.tensors.items():
            if tensor.requires_grad:
                self.store.tensors[name] = tensor.detach()

    # --- whole-state operations, each written once for every architecture ---

    def fork(self, src: int, dst: int, length: int | None = None) -> None:
        """Copies slot `src` to slot `dst`, its first `length` tokens only if given.

        Raises StateError where a shorter copy would need a recurrence's past: fork at the full length instead.
        """
        self._known([src, dst])
        held = int(self.store.length[src])
        length = held if length is None else length
        if not 0 <= length <= held:
            raise StateError(f"slot {src} holds {held} tokens, {length} cannot be forked from it")
        if length < held:
            self._refuse_recurrent(f"slot {src} cannot be forked at {length} of its {held} tokens")
        for tensor in self._used([src, dst]):
            tensor[dst] = tensor[src]
        if length < held:
            self._clear([dst], [length])
            self.store.length[dst] = length

    def reorder(self, slots: Slots, *, memory: bool = True) -> None:
        """Slot i becomes a copy of what slots[i] held, for every i; as beam search needs after each step.

        memory=False: each slot has its source's memory already, as beams of one source do, and it is not copied.
        """
        rows = self._rows(slots)
        if len(rows) > len(self.store.length):
            raise StateError(f"{len(rows)} slots do not fit a state of {len(self.store.length)}")
        moved = [(to, row) for to, row in enumerate(rows) if to != row]
        if moved:
            targets, sources = map(list, zip(*moved, strict=True))
            for tensor in self._used([*targets, *sources], memory):
                tensor[targets] = tensor[sources]

    def reset(self, slots: Slots) -> None:
        """Empties slots, memory included, for new documents."""
        rows = self._rows(slots)
        for tensor in self._used(rows):
            tensor[rows] = 0

    def snapshot(self, slots: Slots) -> Snapshot:
        """What `truncate` needs to come back to this moment: recurrent leaves and lengths of the slots."""
        rows = self._rows(slots)
        leaves = {name: tensor[rows].clone() for name, tensor in self._of(PerSlot)}
        return Snapshot(rows, _ints(self.store.length[rows]), leaves)

    def truncate(self, slots: Slots, length: int | Sequence[int], snapshot: Snapshot | None = None) -> None:
        """Cuts slots back to `length` tokens; a model with recurrences needs the snapshot taken at that length.

        Raises StateError for a length that a slot does not reach, or a snapshot of other slots or lengths.
        """
        rows = self._rows(slots)
        lengths = [length] * len(rows) if isinstance(length, int) else list(length)
        if len(lengths) != len(rows) or len(set(rows)) != len(rows):
            raise StateError(
                f"slots {rows} cannot be cut to {lengths} tokens: give each slot once, and a length for each"
            )
        held = _ints(self.store.length[rows])
        for row, now, then in zip(rows, held, lengths, strict=True):
            if not 0 <= then <= now:
                raise StateError(f"slot {row} holds {now} tokens and cannot be cut to {then}")
        if snapshot is not None and [snapshot.slots, snapshot.length] != [rows, lengths]:
            raise StateError(
                f"the snapshot is of slots {snapshot.slots} at {snapshot.length} tokens, not of {rows} at {lengths}"
            )
        if snapshot is None and held != lengths:
            self._refuse_recurrent(f"slots {rows} cannot be cut from {held} to {lengths} tokens without a snapshot")
        if snapshot is not None:
            for name, tensor in self._of(PerSlot):
                tensor[rows] = snapshot.leaves[name]
        self._clear(rows, lengths)
        self.store.length[rows] = torch.tensor(lengths, device=self.store.length.device)

    def save(self, path: Path | str) -> None:
        """Writes everything to one safetensors file, atomically; cells beyond the longest slot are left out.

        Raises StateError where the file cannot be written; what stood there stays.
        """
        store, used = self.store, int(self.store.length.max())
        tensors = {name: tensor[:, :used] if isinstance(store.declared[name], PerToken) else tensor
                   for name, tensor in store.tensors.items()}  # fmt: skip
        tensors |= {"#length": store.length, "#pos": store.pos[:, :used], "#document": store.document[:, :used]}
        tensors |= {"#memory_segment": store.memory_segment}
        about = {"capacity": store.capacity, "memory_capacity": store.memory_capacity, "dtype": str(store.dtype)}
        try:
            with replacing(path) as beside:
                write_tensors(beside, tensors, {"sublayer_state": json.dumps(about)})
        except (SafetensorError, OSError) as error:
            raise StateError(f"{path}: cannot be written: {error}") from None

    @classmethod
    def load(cls, path: Path | str, model: nn.Module, device: torch.device | str | None = None) -> State:
        """The state that `save` wrote, for the same model. Raises StateError for another model's or a broken file."""
        try:
            tensors, metadata = read_tensors(path, device)
            about: dict[str, Any] = json.loads(metadata["sublayer_state"])
            slots, dtype = len(tensors["#length"]), getattr(torch, about["dtype"].removeprefix("torch."))
            room = (slots, about["capacity"], about["memory_capacity"])
            state = cls.allocate(model, *room, dtype=dtype, device=device)
        except (
            SafetensorError,
            OSError,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            RuntimeError,
            StateError,
        ) as e:
            raise StateError(f"{path}: not a saved state: {e}") from None
        store = state.store
        kept = {"#length": store.length, "#pos": store.pos, "#document": store.document} | store.tensors
        kept["#memory_segment"] = store.memory_segment
        if kept.keys() != tensors.keys():
            odd = sorted(kept.keys() ^ tensors.keys())[0]
            raise StateError(f"{path}: the state of another model: {odd} is in only one of them")
        used = int(tensors["#length"].max())
        if int(tensors["#length"].min()) < 0 or used > store.capacity:
            raise StateError(f"{path}: slots of {_ints(tensors['#length'])} tokens do not fit {store.capacity} cells")
        for name, tensor in tensors.items():
            cells = isinstance(store.declared.get(name), PerToken) or name in ("#pos", "#document")
            target = kept[name][:, :used] if cells else kept[name]
            if (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                raise StateError(
                    f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the model keeps {target.dtype} {list(target.shape)}"
                )
            target.copy_(tensor)
        return state

    # --- sizes ---

    def bytes(self) -> int:
        """Bytes allocated: every leaf, and the shared positions, documents and lengths."""
        return sum(tensor.nbytes for tensor in [*self._all(), self.store.length])

    def bytes_needed(self) -> int:
        """Bytes of the leaves alone if windowed layers kept min(length, window) cells; to be shown beside `bytes`."""
        total = 0
        for name, tensor in self.store.tensors.items():
            leaf = self.store.declared[name]
            window = leaf.window if isinstance(leaf, PerToken) else None
            share = tensor[:, :window] if window is not None else tensor
            total += share.numel() * share.element_size()
        return total

    def bytes_per(self, kind: Literal["token", "slot", "memory"]) -> int:
        """Bytes of the leaves for one more token, slot or memory vector (the shared bookkeeping not counted)."""
        chosen = {"token": PerToken, "slot": PerSlot, "memory": PerMemory}[kind]
        cells = {"token": self.store.capacity, "slot": 1, "memory": self.store.memory_capacity}[kind]
        slots = len(self.store.length)
        return sum(tensor.nbytes // (slots * cells) for _, tensor in self._of(chosen))

    # --- inside ---

    def _of(self, kind: type[Leaf]) -> list[tuple[str, Tensor]]:
        return [(n, t) for n, t in self.store.tensors.items() if isinstance(self.store.declared[n], kind)]

    def _all(self) -> list[Tensor]:
        return [*self.store.tensors.values(), self.store.pos, self.store.document, self.store.memory_segment]

    def _used(self, rows: list[int], memory: bool = True) -> list[Tensor]:
        """Everything, but of cells per token only those that one of the rows uses: the others hold zeros."""
        store, used = self.store, int(self.store.length[rows].max()) if rows else 0
        tokens = [*(tensor for _, tensor in self._of(PerToken)), store.pos, store.document]
        others = [*(tensor for _, tensor in self._of(PerSlot)), store.length]
        if memory:
            others += [*(tensor for _, tensor in self._of(PerMemory)), store.memory_segment]
        return [*(tensor[:, :used] for tensor in tokens), *others]

    def _clear(self, rows: list[int], lengths: list[int]) -> None:
        held = _ints(self.store.length[rows])
        for tensor in [*(tensor for _, tensor in self._of(PerToken)), self.store.pos, self.store.document]:
            for row, start, end in zip(rows, lengths, held, strict=True):
                tensor[row, start : max(start, end)] = 0

    def _rows(self, slots: Slots) -> list[int]:
        rows = _ints(torch.as_tensor(slots, dtype=torch.long).reshape(-1))
        self._known(rows)
        return rows

    def _known(self, rows: list[int]) -> None:
        for row in rows:
            if not 0 <= row < len(self.store.length):
                raise StateError(f"slot {row}: the state has slots 0 to {len(self.store.length) - 1}")

    def _refuse_recurrent(self, what: str) -> None:
        kept = self._of(PerSlot)
        if kept:
            raise StateError(f"{what}: {kept[0][0]} is a recurrence, whose past is not kept")


def _declared(module: nn.Module) -> dict[str, Leaf]:
    state = getattr(module, "state", None)
    return cast("dict[str, Leaf]", state()) if callable(state) else {}


def _ints(tensor: Tensor) -> list[int]:
    return cast(Any, tensor).tolist()


def _neighbours(slots: Tensor, count: int) -> slice | Tensor:
    """A slice where the slots are ascending neighbours, so that reading them is a view."""
    rows = _ints(slots)
    bad = next((row for row in rows if not 0 <= row < count), None)
    if bad is not None:
        raise StateError(f"slot {bad}: the state has slots 0 to {count - 1}")
    if len(set(rows)) < len(rows):
        raise StateError(f"slots {rows}: a batch may name each slot once")
    if not rows:
        raise StateError("slots=[]: a batch has at least one row")
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return slots


def _flatten(state: State) -> tuple[list[Any], Any]:
    store = state.store
    names = list(store.tensors)
    tensors = [store.length, store.pos, store.document, store.memory_segment, *store.tensors.values()]
    sizes = (store.capacity, store.memory_capacity, store.dtype)
    return tensors, (sizes, tuple(store.declared.items()), tuple(names), state.path)


def _unflatten(tensors: Any, about: Any) -> State:
    length, pos, document, memory_segment, *leaves = tensors
    (capacity, memory_capacity, dtype), declared, names, path = about
    tensors = dict(zip(names, leaves, strict=True))
    shared = (length, pos, document, memory_segment)
    return State(_Store(capacity, memory_capacity, dtype, dict(declared), tensors, *shared), path)


pytree.register_pytree_node(State, _flatten, _unflatten)
