"""The models that pass through the contracts: every family of recipes, variants that take other paths, and what no
recipe is yet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.frames import Frames
from sublayer.nn.head import Classifier, Transform
from sublayer.nn.linear_attention import LinearAttention, RandomFeatures
from sublayer.nn.moe import MoEOp
from sublayer.nn.norm import LayerNorm
from sublayer.nn.patches import Patches
from sublayer.nn.position import Sinusoidal
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import DynamicNtk, Linear, Llama3, LongRope, Yarn
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm
from sublayer.recipes import FAMILIES, family
from sublayer.recipes.actions import PATCH, ImagesAndTokens
from sublayer.recipes.dit import Noised
from sublayer.recipes.evoformer import EmbedAlignment
from sublayer.step import Step
from tests.case import Case, Document, Padding, Together, texts


def _recipe(name: str) -> Case:
    module = family(name)
    spec = getattr(module, name)(**module.TINY)
    documents, together = _documents(spec), _together if isinstance(spec.embedding, EmbedAlignment) else None
    return Case(name, spec, module.EXEMPT, bool(module.HF), exact=_exact(spec), documents=documents, together=together)


def _exact(spec: Model) -> bool:
    """Not with experts: how many rows an expert multiplies at once, and so their rounding, depends on all documents."""
    return not any(isinstance(module, MoEOp) for module in spec.empty(device="meta").modules())


def _variant(
    family_name: str,
    suffix: str,
    *,
    hf: bool | None = None,
    length_dependent: bool = False,
    exempt: Mapping[str, str] | None = None,
    **changes: Any,
) -> Case:
    module = family(family_name)
    spec = getattr(module, family_name)(**module.TINY | changes)
    return Case(
        f"{family_name}, {suffix}",
        spec,
        module.EXEMPT | (exempt or {}),
        bool(module.HF) if hf is None else hf,
        length_dependent,
        _exact(spec),
        documents=_documents(spec),
    )


def _documents(spec: Model) -> Callable[[Case, Sequence[int], int], list[Document]]:
    if spec.encoder is not None and isinstance(spec.encoder.embed, Frames):
        return _recordings
    kinds = {Patches: _images, Noised: _noised, EmbedAlignment: _alignments, ImagesAndTokens: _observations}
    return kinds.get(type(spec.embedding), texts)


def _images(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """Noise of the size that the positions belong to, one image for each length asked for."""
    generator, front = torch.Generator().manual_seed(seed), cast(Patches, case.spec.embedding)
    return [Document(_noise(front, generator)) for _ in lengths]


def _noised(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """The same, each at a time and of a class."""
    generator, front = torch.Generator().manual_seed(seed), cast(Noised, case.spec.embedding)

    def number(most: int) -> torch.Tensor:
        return torch.randint(most, (), generator=generator)

    return [
        Document(
            {"images": _noise(front.patches, generator), "time": number(1000), "classes": number(front.classes + 1)}
        )
        for _ in lengths
    ]


def _noise(front: Patches, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(front.channels, *front.image, generator=generator)


def _observations(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """An image of one patch, which comes first, and random ids: so a document may be cut anywhere."""
    generator, front = torch.Generator().manual_seed(seed), cast(ImagesAndTokens, case.spec.embedding)
    patches = cast(Patches, front.patches)

    def document(length: int) -> Document:
        ids = torch.randint(front.vocab, (length,), generator=generator)
        ids[0] = PATCH
        return Document({"ids": ids, "images": _noise(patches, generator)[None]})

    return list(map(document, lengths))


def _recordings(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """Random ids, each text of a recording of its own, as long as the model hears."""
    generator, front = torch.Generator().manual_seed(seed), cast(Frames, cast(Trunk, case.spec.encoder).embed)
    vocab = cast(int, case.spec.vocab)
    return [
        Document(
            torch.randint(vocab, (length,), generator=generator),
            torch.randn(2 * front.length, front.features, generator=generator),
        )
        for length in lengths
    ]


def _alignments(case: Case, lengths: Sequence[int], seed: int) -> list[Document]:
    """Two to four aligned sequences each; some cells are padding, which stands where their sequences lack a part."""
    generator, front = torch.Generator().manual_seed(seed), cast(EmbedAlignment, case.spec.embedding)

    def document(length: int) -> Document:
        count = 2 + length % 3
        ids = torch.randint(front.classes, (count, length), generator=generator)
        present = torch.rand(count, length, generator=generator) < 0.9
        target = torch.randint(front.residues, (length,), generator=generator)
        return Document({"msa": ids, "target": target, "present": present})

    return list(map(document, lengths))


def _together(case: Case, documents: Sequence[Document], side: Padding) -> Together:
    """Alignments padded to one number of residues and of sequences, with arbitrary classes at padding."""
    counts, lengths = zip(*(document.inputs["msa"].shape for document in documents), strict=True)
    B, S, L = len(documents), max(counts) + 1, max(lengths) + 2
    inputs = {"msa": torch.arange(B * S * L).view(B, S, L) % 23, "target": torch.arange(B * L).view(B, L) % 21}
    inputs["present"], segment = torch.zeros(B, S, L, dtype=torch.bool), torch.zeros(B, L, dtype=torch.long)
    where: list[Any] = []
    for i, (document, count, length) in enumerate(zip(documents, counts, lengths, strict=True)):
        rows, residues = (
            slice(start, start + size)
            for start, size in (
                ({"left": room, "right": 0, "around": room // 2}[side], size)
                for room, size in ((S - count, count), (L - length, length))
            )
        )
        inputs["present"][i] = True  # of residues beside the alignment, the segment says that they are padding
        inputs["present"][i, :, residues] = False
        for name in ("msa", "present"):
            inputs[name][i, rows, residues] = document.inputs[name]
        inputs["target"][i, residues], segment[i, residues] = document.inputs["target"], 1
        where.append({"msa": (rows, residues), "distogram": (residues, residues)})
    return Together(inputs, Step(segment=segment), None, where)


# Lengths are chosen so that the contracts' documents, of up to 19 tokens, cross them.
DYNAMIC = Rope(scaling=DynamicNtk(2.0, trained_length=8))
LONG = Rope(scaling=LongRope((1.0, 1.1, 1.3, 1.6), (1.0, 2.0, 3.5, 6.0), trained_length=8, factor=4.0))

CAPPED: dict[str, Any] = {"qk_norm": False, "softcap": 3.0, "logit_cap": 4.0, "scale": 0.25, "local_rope": None}
BOTH_WAYS = {"incremental": "Queries see both ways, so nothing can be continued."}

VARIANTS = (
    _variant("deberta", "convolved", kernel=3),
    _variant("deberta", "v1", buckets=None, shared=False, key_bias=False, relative_norm=False, context=32),
    _variant("bert", "classes of documents", head=Classifier(5, "first", Transform("tanh"))),
    _variant("dinov2", "registers", registers=3),
    _variant("dinov2", "gated", gated=True, activation="silu", hidden=88),
    _variant("gemma", "1", sandwich=False, qk_norm=False, local=(), window=None, rope=Rope()),
    _variant("gemma", "2, with caps", rope=Rope(), **CAPPED),
    _variant("gemma", "both ways", causal=False, exempt=BOTH_WAYS),
    _variant(
        "gemma4",
        "values that are keys, nothing shared",
        sharing=0,
        double=False,
        layer_size=None,
        tied_values=True,
        global_kv_heads=1,
    ),
    _variant("gpt_neox", "in sequence", parallel=False),
    _variant("gpt2", "untied", tied=False),
    _variant("linear_transformer", "Performer", hf=False, features=RandomFeatures(12)),
    _variant("s4", "S4D", hf=False, structure="diagonal", discretisation="zoh", start="inv", repeats=2),
    # Each layer its own window, which no config.json of this line says.
    _variant("llama", "windows", hf=False, window=(4, 6)),
    _variant("llama", "Mistral's window", window=5),
    _variant("llama", "Qwen2", qkv_bias=True, tied=True),
    _variant("llama", "Qwen3", qk_norm=True, head_size=6),
    _variant("llama", "multi-query, interleaved pairs", hf=False, kv_heads=1, rope=Rope(pairing="interleaved", size=4)),
    _variant("llama", "llama3 rope", rope=Rope(scaling=Llama3(8.0, 1.0, 4.0, trained_length=32))),
    _variant("llama", "linear rope", rope=Rope(scaling=Linear(2.5))),
    _variant("llama", "YaRN", rope=Rope(scaling=Yarn(4.0, trained_length=8))),
    _variant("llama", "dynamic NTK", length_dependent=True, rope=DYNAMIC),
    _variant("phi3", "LongRoPE", length_dependent=True, rope=LONG),
    _variant("llama", "LongRoPE", length_dependent=True, rope=LONG),
    replace(_variant("convolution", "ConvS2S", encoder_layers=2, dilations=(2, 1), context=64), exempt={}),
    _variant("rnn", "Elman", kind="elman"),
    _variant("rnn", "GRU, tied", kind="gru", tied=True),
    _variant(
        "transformer",
        "pre-norm, two tables",
        hf=False,
        norm_first=True,
        source_vocab=71,
        sinusoids="interleaved",
        head_bias=False,
    ),
    _variant("seq2seq", "two layers of LSTM", kind="lstm", layers=2, maxout=None),
    _variant("seq2seq", "without attention", kind="lstm", layers=2, attention=False),
    _variant("t5", "1.1", gated=True, activation="gelu_tanh", tied=False),
)


def _both_ways() -> Model:
    """An encoder of linear attention."""
    attention = LinearAttention(4, causal=False)
    block = Block((pre_norm("attn", attention, LayerNorm()), pre_norm("ffn", FeedForward(48), LayerNorm())))
    return Model(32, encoder=Trunk(Embed(61, position=Sinusoidal()), (block, block), LayerNorm()))


MODELS = (
    Case("linear attention both ways", _both_ways(), {
        "incremental": "every token sees those after it, so none can be answered before they are known",
        "kernels": "it has no softmax attention, so no kernel computes it",
    }),
)  # fmt: skip

CASES = {case.name: case for case in (*map(_recipe, FAMILIES), *VARIANTS, *MODELS)}
