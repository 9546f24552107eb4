"""Sublayer, Block, Trunk, Model: how ops become an architecture.

B batch, L new tokens, M keys, D model width, N heads, V vocabulary. Modules pass auxiliary losses along as extras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..state import PerMemory, State
from ..step import Step
from .attention import AttendingOp
from .embed import Embed
from .geometry import locate, share
from .head import Head
from .initialise import Init, initialise
from .op import Context, Extras, Op, Part, Tree, bounded, scoped
from .position import Learned
from .rope import Rope

if TYPE_CHECKING:
    from ..decoding.generate import Generated
    from ..decoding.request import Prompts


class Sublayer(Part):
    """One residual step: y = after(skip · x + scale · post(op(pre(x)))).

    The places receive (x, step), so a place may read Step.condition (adaptive norms and gates).
    """

    name: str
    """The key under which it sits in its block, and in every checkpoint."""
    op: Part
    """Attention, feed-forward, recurrence: what is computed."""
    pre: Part | None = None
    """Before the op: the norm of pre-norm models."""
    post: Part | None = None
    """After the op, inside the residual branch: the second norm of sandwich-norm models."""
    after: Part | None = None
    """After the sum: the norm of post-norm models."""
    scale: Part | float = 1.0
    """What the branch is multiplied by: a number, or a place that scales it."""
    skip: float = 1.0
    """What x is multiplied by: 1 for a plain residual, 0 for none, above 1 in DeepNorm (arXiv 2203.00555)."""
    dropout: float = 0.0
    """Share of the branch zeroed while training, after `post`."""

    def check(self) -> None:
        self.require(self.name.isidentifier(), f"name={self.name!r} must be an identifier: it becomes a checkpoint key")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> SublayerOp:
        return SublayerOp(self, dim, context)


def pre_norm(name: str, op: Part, norm: Part, dropout: float = 0.0) -> Sublayer:
    """x + op(norm(x))."""
    return Sublayer(name, op, pre=norm, dropout=dropout)


def post_norm(name: str, op: Part, norm: Part, dropout: float = 0.0) -> Sublayer:
    """norm(x + op(x)), as in 2017."""
    return Sublayer(name, op, after=norm, dropout=dropout)


class SublayerOp(nn.Module):
    """(x, step, state) → (y, extras); x is a tensor or a dict of tensors, whose unreturned leaves pass unchanged."""

    def __init__(self, spec: Sublayer, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.pre = spec.pre.build(dim, context) if spec.pre else None
        self.op = spec.op.build(dim, context)
        self.post = spec.post.build(dim, context) if spec.post else None
        self.after = spec.after.build(dim, context) if spec.after else None
        self.scale = spec.scale.build(dim, context) if isinstance(spec.scale, Part) else None

    def forward(self, x: Tree, step: Step, state: State | None = None) -> tuple[Tree, Extras]:
        branch, extras = self.branch(x, step, state)
        if isinstance(x, dict):
            assert isinstance(branch, dict)
            return x | {name: self._join(x[name], y, step) for name, y in branch.items()}, extras
        assert isinstance(branch, Tensor)
        return self._join(x, branch, step), extras

    def branch(self, x: Tree, step: Step, state: State | None) -> tuple[Tree, Extras]:
        """scale · post(op(pre(x))), without the residual."""
        inner = x if self.pre is None else self.pre(x, step)
        y, extras = _with_extras(self.op(inner, step, scoped(state, "op")))
        if isinstance(y, dict):
            leaves = cast("dict[str, Tensor]", y)
            return {name: self._finish(leaf, step) for name, leaf in leaves.items()}, extras
        return self._finish(y, step), extras

    def _finish(self, y: Tensor, step: Step) -> Tensor:
        y = bounded(y)
        if self.post is not None:
            y = self.post(y, step)
        y = F.dropout(y, self.spec.dropout, self.training)
        if self.scale is not None:
            return self.scale(y, step)
        return y if self.spec.scale == 1.0 else y * cast(float, self.spec.scale)

    def _join(self, x: Tensor, y: Tensor, step: Step) -> Tensor:
        if self.spec.skip != 0.0:
            y = bounded((x if self.spec.skip == 1.0 else self.spec.skip * x) + y)
        return y if self.after is None else self.after(y, step)


class Block(Part):
    """Sublayers one after the other, or all on the same input (GPT-J, GPT-NeoX)."""

    sublayers: tuple[Sublayer, ...]
    """In order; their names are distinct."""
    parallel: bool = False
    """Whether all sublayers read the block's input, and their branches are summed."""
    pre: Part | None = None
    """One norm shared by parallel sublayers."""

    def check(self) -> None:
        names = [sublayer.name for sublayer in self.sublayers]
        self.require(len(set(names)) == len(names), f"sublayers share a name: {names}")
        self.require(
            self.parallel or self.pre is None, "pre is the norm shared by parallel sublayers; set parallel=True"
        )
        alone = all(sublayer.after is None and sublayer.skip == 1.0 for sublayer in self.sublayers)
        self.require(not self.parallel or alone, "parallel sublayers have no `after` and a plain skip")

    def build(self, dim: int, context: Context) -> BlockOp:
        return BlockOp(self, dim, context)


class BlockOp(nn.Module):
    """(x, step, state) → (y, extras)."""

    def __init__(self, spec: Block, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.pre = spec.pre.build(dim, context) if spec.pre else None
        self.names = [sublayer.name for sublayer in spec.sublayers]
        for sublayer in spec.sublayers:
            if hasattr(self, sublayer.name):
                raise SpecError(f"Block: a sublayer cannot be named {sublayer.name!r}, which modules use themselves")
            self.add_module(sublayer.name, sublayer.build(dim, context))

    def forward(self, x: Tree, step: Step, state: State | None = None) -> tuple[Tree, Extras]:
        extras: Extras = {}
        shared = x if self.pre is None else self.pre(x, step)
        for name in self.names:
            sublayer = cast(SublayerOp, getattr(self, name))
            if self.spec.parallel:
                branch, more = sublayer.branch(shared, step, scoped(state, name))
                x = _add(x, branch)
            else:
                x, more = sublayer(x, step, scoped(state, name))
            extras = _sum(extras, more)
        return x, extras


def repeat(block: Block, layers: int) -> tuple[Block, ...]:
    """The same block `layers` times."""
    return (block,) * layers


class Trunk(Part):
    """A front end, blocks, and a last norm."""

    embed: Part
    """The front end (Embed for tokens): (inputs, step) → (x, step)."""
    blocks: tuple[Block, ...]
    """The layers, under the keys "0", "1", …"""
    norm: Part | None = None
    """After the last block."""
    bias: Part | None = None
    """Score bias shared by all layers (T5 buckets, ALiBi): (query positions, key positions) → Step.bias."""
    dropout: float = 0.0
    """Share of the result zeroed while training, after the last norm."""

    def check(self) -> None:
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> TrunkOp:
        return TrunkOp(self, dim, context)


class TrunkOp(nn.Module):
    """(inputs, step, state) → (x, step, extras); `table` is what a shared embedding reads."""

    def __init__(self, spec: Trunk, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        context = Context(memory=context.memory, shared=context.shared)  # rotary tables are numbered for each trunk
        self.embed = spec.embed.build(dim, context)
        self.blocks = nn.ModuleDict({str(i): block.build(dim, context) for i, block in enumerate(spec.blocks)})
        self.norm = spec.norm.build(dim, context) if spec.norm else None
        self.bias = spec.bias.build(dim, context) if spec.bias else None
        self.rotary = cast("list[tuple[Rope, int]]", context.rotary)

    def forward(
        self, inputs: Any, step: Step, state: State | None = None, table: Tensor | None = None
    ) -> tuple[Tree, Step, Extras]:
        if isinstance(inputs, Tensor) and not inputs.is_floating_point():  # ids; images and frames are no tokens yet
            step = locate(step, inputs, state)
        if table is not None:
            x, step = self.embed(inputs, step, table)
        elif isinstance(self.embed, Op):  # a front end that keeps state
            x, step = self.embed(inputs, step, scoped(state, "embed"))
        else:
            x, step = self.embed(inputs, step)
        stream = next(iter(cast("dict[str, Tensor]", x).values())) if isinstance(x, dict) else cast(Tensor, x)
        if step.shared is None:  # the front end changed lengths or positions
            step = locate(step, stream, state)
        step = share(step, stream, state, self.rotary, self.bias)
        extras: Extras = {}
        blocks = scoped(state, "blocks")
        for name, block in self.blocks.items():
            x, more = block(x, step, scoped(blocks, name))
            extras = _sum(extras, more)
        if self.norm is not None:
            x = self.norm(x, step)
        if self.spec.dropout and self.training:
            x = _dropped(cast(Tree, x), self.spec.dropout)
        return cast(Tree, x), step, extras


class Model(Part):
    """A whole architecture: an encoder, a decoder or both, and a head.

    `build` gives the module. All that changes the computed function is here; kernels, dtypes and devices are not.
    """

    dim: int
    """D, the width of the residual stream."""
    decoder: Trunk | None = None
    """The trunk whose output the head reads; it may cross-attend to the encoder's."""
    encoder: Trunk | None = None
    """The trunk that makes the memory, or, without a decoder, the output itself."""
    head: Part | None = Head()
    """What the output answers; None: the model returns hidden vectors."""
    tied: bool = False
    """Whether the head uses the embedding's table as its weight."""
    init: Init = Init()
    """How a new model begins."""
    shared: bool = False
    """Whether the encoder embeds its tokens with the decoder's table."""

    def check(self) -> None:
        self.require(self.dim > 0, f"dim must be above 0, got {self.dim}")
        self.require(self.encoder is not None or self.decoder is not None, "a model needs an encoder or a decoder")
        self.require(not self.tied or isinstance(self.embedding, Embed), "tied=True needs a token embedding (Embed)")
        tables = [trunk.embed.vocab if trunk and isinstance(trunk.embed, Embed) else None
                  for trunk in (self.encoder, self.decoder)]  # fmt: skip
        self.require(
            not self.shared or (None not in tables and tables[0] == tables[1]),
            "shared=True needs an encoder and a decoder that embed tokens (Embed) of one vocabulary",
        )

    @property
    def embedding(self) -> Part:
        """The front end of the trunk that the head reads."""
        return cast(Trunk, self.decoder or self.encoder).embed

    @property
    def vocab(self) -> int | None:
        """V, where the front end embeds tokens."""
        return self.embedding.vocab if isinstance(self.embedding, Embed) else None

    @property
    def context(self) -> int | None:
        """How many positions the model can tell apart, where a table limits them."""
        position = getattr(self.embedding, "position", None)
        return position.length if isinstance(position, Learned) else None

    def build(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        seed: int = 0,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ModelOp:
        """The model, initialised from `seed`; on device "meta" it has shapes and no values.

        Raises SpecError for sizes that do not fit together.
        """
        model = self.empty(device=device, dtype=dtype)
        if torch.device(device).type != "meta":
            initialise(model, self.init, seed)
        return model

    def empty(self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> ModelOp:
        """The model with room for its parameters and no values yet: what a checkpoint is read into."""
        try:
            with torch.device("meta"):
                model = ModelOp(self)
        except (RuntimeError, TypeError, OverflowError) as error:  # torch cannot count so many bytes
            raise SpecError(f"sizes beyond any memory: {str(error).splitlines()[0]}") from None
        if (str(device), dtype) != ("meta", torch.float32):
            model.make_room(device, dtype)
        return model

    def parameters(self) -> int:
        """How many parameters the model has, counted on meta; a tied table counts once."""
        return sum(parameter.numel() for parameter in self.build(device="meta").parameters())

    def active_parameters(self) -> int:
        """How many of them a token goes through: all but those of the experts it is not sent to."""
        modules = self.build(device="meta").modules()
        return self.parameters() - sum(module.idle for module in modules if isinstance(module, Op))


class ModelOp(nn.Module):
    """The built model. `model.spec` is what it was built from."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = spec.encoder.build(spec.dim, Context(shared=spec.shared)) if spec.encoder else None
        self.decoder = spec.decoder.build(spec.dim, Context(memory=spec.dim)) if spec.decoder else None
        self.head = spec.head.build(spec.dim, Context(vocab=spec.vocab, tied=spec.tied)) if spec.head else None
        self.unread = self._unread()

    def _unread(self) -> tuple[str, ...]:
        """The fields of Step that nothing here looks at: a caller who gives one means another model."""
        ops = [module for module in self.modules() if isinstance(module, Op)]
        leaves = [leaf for op in ops for leaf in op.state().values()]
        remembers = self.encoder is not None or any(isinstance(leaf, PerMemory) for leaf in leaves)
        unread = () if any(isinstance(op, AttendingOp) for op in ops) else ("bias", "mask", "prefix")
        return unread if remembers else (*unread, "memory", "memory_segment")

    def forward(
        self,
        inputs: Any,
        step: Step | None = None,
        state: State | None = None,
        source: Any = None,
        *,
        output: Literal["logits", "hidden"] = "logits",
    ) -> Any:
        """inputs: ids [B, L] (or what the front end takes) → logits [B, L, V], or hidden vectors [B, L, D].

        With a state the call continues its slots, and their lengths advance by L. source: the encoder's input, whose
        documents are Step.memory_segment. Returns (result, extras) where an op has auxiliary losses.
        Raises InputError for ids or positions outside the tables and for fields of Step that nothing here reads,
        StateError for what the state cannot hold.
        """
        extras: Extras = {}
        if output not in ("logits", "hidden"):
            raise InputError(f'output={output!r}: "logits" or "hidden"')
        if step is None:
            step = Step()
        elif isinstance(step, Tensor):  # an easy mistake: model(source, ids)
            raise InputError("the second argument is a Step, got a tensor; an encoder's input is source=…")
        for name in self.unread:
            if getattr(step, name) is not None:
                raise InputError(f"Step.{name}: nothing in this model reads it")
        if source is not None:
            _, step, extras = self._encode(source, step)
        trunk = self.decoder if self.decoder is not None else cast(TrunkOp, self.encoder)
        scope = scoped(state, "decoder" if self.decoder is not None else "encoder")
        x, done, more = cast("tuple[Tree, Step, Extras]", trunk(inputs, step, scope))
        extras = _sum(extras, more)
        if state is not None and done.shared is not None and done.shared.place is not None:
            state.advance(done.shared.place)
        if output == "logits" and self.head is not None:
            x = self.head(x, done, self.table())
        return (x, extras) if extras else x

    def make_room(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Gives all that was built on meta memory of its own: parameters without values yet, and what an op counts,
        which begins at 0."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                room = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(room, parameter.requires_grad))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))

    def encode(self, source: Any, step: Step | None = None) -> tuple[Tensor, Step]:
        """The encoder's output [B, M, D] for `source`, and `step` with it as memory.

        Documents and padding of the source are Step.memory_segment. What the encoder's front end leaves in
        Step.condition (the last state of a recurrence) the decoder finds there.
        Raises InputError for a model without an encoder.
        """
        memory, step, _ = self._encode(source, step if step is not None else Step())
        return memory, step

    def _encode(self, source: Any, step: Step) -> tuple[Tensor, Step, Extras]:
        if self.encoder is None:
            raise InputError("the model has no encoder: leave source out")
        inner = Step(segment=step.memory_segment, slots=step.slots, condition=step.condition)
        memory, inner, extras = self.encoder(source, inner, None, self._tokens() if self.spec.shared else None)
        found = step.replace(memory=memory, memory_segment=inner.segment, condition=inner.condition)
        return memory, found, extras

    def generate(self, prompts: Prompts, **options: Any) -> list[Generated]:
        """Continues prompts (ids, or text with tokenizer=…); see sublayer.decoding.generate for the options."""
        from ..decoding.generate import generate

        return generate(self, prompts, **options)

    def logits(self, hidden: Tensor, step: Step | None = None) -> Tensor:
        """The head alone: hidden vectors […, D] → logits […, V]. step: the geometry, for heads that pool."""
        if self.head is None:
            raise InputError("the model has no head: its outputs are hidden vectors")
        return self.head(hidden, step, self.table())

    def with_head(self, head: Part | None, *, tied: bool = False, seed: int = 0) -> ModelOp:
        """The same trunks, shared and not copied, under a new head: a pretrained encoder to be tuned for another task.

        The head begins as a new model's does, from `seed`. Raises SpecError for one that does not fit.
        """
        spec = self.spec.replace(head=head, tied=tied)
        model, like = spec.empty(device="meta"), next(self.parameters())
        model.encoder, model.decoder = self.encoder, self.decoder
        if model.head is not None:
            model.head = model.head.to(like.dtype).to_empty(device=like.device)
            initialise(model.head, spec.init, seed)
        return model.train(self.training)

    def table(self) -> Tensor | None:
        """The embedding's table [V, D] where the head is tied to it, else None."""
        return self._tokens() if self.spec.tied else None

    def _tokens(self) -> Tensor:
        trunk = cast(TrunkOp, self.decoder if self.decoder is not None else self.encoder)
        return cast(Any, trunk.embed).tokens.weight


def _with_extras(result: Any) -> tuple[Any, Extras]:
    return cast("tuple[Any, Extras]", result) if isinstance(result, tuple) else (result, {})


def _dropped(x: Tree, share: float) -> Tree:
    if isinstance(x, dict):
        return {name: F.dropout(leaf, share) for name, leaf in x.items()}
    return F.dropout(x, share)


def _sum(extras: Extras, more: Extras) -> Extras:
    return extras | {name: extras[name] + value if name in extras else value for name, value in more.items()}


def _add(x: Tree, branch: Tree) -> Tree:
    if isinstance(x, dict):
        return x | {name: x[name] + y for name, y in cast("dict[str, Tensor]", branch).items()}
    return x + cast(Tensor, branch)
