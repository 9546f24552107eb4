"""Spec: values that compare, print, travel as JSON and refuse what they do not know."""

import copy
import json
import pickle
import re
from contextlib import suppress
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.errors import SpecError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.initialise import Init
from sublayer.nn.norm import LayerNorm, RMSNorm
from sublayer.nn.op import Part
from sublayer.nn.position import Alibi, Learned, Shaw, Sinusoidal, T5Buckets
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import DynamicNtk, Linear, Llama3, LongRope, Ntk, Yarn
from sublayer.nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from sublayer.recipes import gpt2
from sublayer.recipes.gpt2 import TINY as TINY_GPT2
from sublayer.spec import MAX_PARTS, Spec
from tests.tiny import tiny

SPEC = tiny()

# The public contract: a key that is renamed or dropped breaks every checkpoint and every saved override.
KEYS = {
    "Alibi": "heads",
    "Attention": "heads kv_heads head_size causal window keep_first cross position qk_norm softcap sinks scale bias "
    "out_bias dropout qk_norm_joint gated k_bias v_norm tied_values keeps reads",
    "Block": "sublayers parallel pre",
    "Classifier": "classes pool before bias dropout",
    "DynamicNtk": "factor trained_length",
    "Embed": "vocab scale position types norm dropout",
    "FeedForward": "hidden activation gated bias dropout",
    "Head": "bias scale softcap before",
    "Init": "std residual embedding position queries",
    "LayerNorm": "eps bias",
    "Learned": "length offset",
    "Linear": "factor",
    "Llama3": "factor low_frequency_factor high_frequency_factor trained_length",
    "LongRope": "short long trained_length factor attention_factor",
    "Model": "dim decoder encoder head tied init shared",
    "Ntk": "factor",
    "Pooled": "pool before normalise",
    "Proportional": "share factor",
    "RMSNorm": "eps plus_one groups weight",
    "Rope": "theta size pairing scaling",
    "Shaw": "distance values",
    "Sinusoidal": "theta layout reached",
    "Spans": "before bias dropout",
    "Sublayer": "name op pre post after scale skip dropout",
    "T5Buckets": "heads bidirectional buckets distance",
    "Transform": "activation norm bias dropout",
    "Trunk": "embed blocks norm bias dropout",
    "Yarn": "factor trained_length beta_fast beta_slow attention_factor mscale mscale_all_dim truncate",
}


def fields_of(cls: Any) -> tuple[Field, ...]:
    return fields(cls)


@pytest.mark.parametrize("tag", KEYS)
def test_json_keys_are_frozen(tag: str) -> None:
    """New keys may be added here, at the end and with a default; those that stand here stay."""
    known = Spec._tags[tag]
    assert [field.name for field in fields_of(known)] == KEYS[tag].split()


# --- JSON ---

LEAVES = (Attention, FeedForward, LayerNorm, RMSNorm, Learned, Sinusoidal, Shaw, T5Buckets, Alibi)


def values(hint: Any) -> st.SearchStrategy:
    """Values of a field's type."""
    if hint is Part:
        return st.sampled_from(LEAVES).flatmap(specs)
    if isinstance(hint, type) and issubclass(hint, Spec):
        return specs(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_args(hint):
        return st.one_of(*map(values, get_args(hint)))
    known = {int: st.integers(-1, 8), bool: st.booleans(), str: st.sampled_from(("attn", "ffn", "1", "x y")),
             float: st.floats(-1, 8) | st.sampled_from((0.0, 1e-30, 1e30)), type(None): st.none()}  # fmt: skip
    return known[hint]


@st.composite
def specs(draw, cls: type[Spec]) -> Spec:
    """A random spec of a class: fields at their defaults or drawn; what `check` refuses is drawn again."""
    hints = get_type_hints(cls)
    for _ in range(10):
        chosen = {
            f.name: draw(values(hints[f.name])) for f in fields_of(cls) if f.default is MISSING or draw(st.booleans())
        }
        try:
            return cls(**chosen)
        except SpecError:
            continue
    fallback = {Attention: Attention(2), T5Buckets: T5Buckets(2, True), Yarn: Yarn(2.0, 8), Rope: Rope(),
                LongRope: LongRope((1.0,), (2.0,), 8), Llama3: Llama3(8.0, 1.0, 4.0, 8)}  # fmt: skip
    if cls in fallback:
        return fallback[cls]
    return draw(st.nothing())


@st.composite
def models(draw) -> Model:
    count = draw(st.integers(0, 3))
    blocks: list[Block] = []
    for _ in range(count):
        names = draw(st.lists(st.sampled_from(("attn", "ffn", "mix", "ß")), min_size=1, max_size=2, unique=True))
        parts = st.sampled_from((Attention, FeedForward)).flatmap(specs)
        norms = st.none() | specs(RMSNorm) | specs(LayerNorm)
        sublayers = [Sublayer(name, draw(parts), draw(norms), draw(norms), draw(norms)) for name in names]
        blocks += [Block(tuple(sublayers))] * draw(st.integers(1, 3))
    embed = Embed(draw(st.integers(1, 99)), position=draw(st.none() | specs(Learned) | specs(Sinusoidal)))
    trunk = Trunk(embed, tuple(blocks), draw(st.none() | specs(RMSNorm)), draw(st.none() | specs(T5Buckets)))
    return Model(draw(st.integers(1, 64)), trunk, tied=draw(st.booleans()), init=draw(specs(Init)))


def check_round_trip(spec: Spec) -> None:
    text = json.dumps(spec.to_json(), allow_nan=False)
    again = type(spec).from_json(json.loads(text))
    assert again == spec
    assert hash(again) == hash(spec)
    assert repr(again) == repr(spec)
    assert again.tree() == spec.tree()
    assert json.dumps(again.to_json()) == text
    assert Spec.from_json(json.loads(text)) == spec


@given(models())
def test_models_travel_as_json(spec: Model) -> None:
    check_round_trip(spec)


@pytest.mark.parametrize("tag", KEYS)
@given(data=st.data())
@settings(max_examples=15)
def test_every_spec_travels_as_json(tag: str, data) -> None:
    if tag not in ("Model", "Trunk", "Block", "Sublayer"):
        check_round_trip(data.draw(specs(Spec._tags[tag])))


@given(models())
def test_a_repr_is_python_that_builds_the_spec(spec: Model) -> None:
    assert eval(repr(spec), Spec._tags | {"inf": float("inf")}) == spec


@given(models())
def test_specs_are_values(spec: Model) -> None:
    assert copy.deepcopy(spec) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, copy.deepcopy(spec)}) == 1
    assert spec != spec.replace(dim=spec.dim + 1)


def test_runs_of_equal_specs_are_written_once() -> None:
    spec = tiny(layers=80, window=(None,) * 40 + (8,) * 40)
    blocks = spec.to_json()["decoder"]["blocks"]
    assert [run["repeat"] for run in blocks] == [40, 40]
    assert Model.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert Model.from_json({**spec.to_json(), "decoder": {**spec.to_json()["decoder"], "blocks": []}}).find(
        "decoder.blocks"
    ) == ()  # fmt: skip


def test_only_neighbours_are_a_run_and_numbers_are_not() -> None:
    spec = LongRope((1.0, 1.0, 2.0), (0.5, 0.5, 0.5), 8)
    assert spec.to_json()["short"] == [1.0, 1.0, 2.0]
    windows = [block.get("repeat", 1) for block in tiny(layers=3, window=(4, None, 4)).to_json()[
        "decoder"]["blocks"]]  # fmt: skip
    assert windows == [1, 1, 1]


def test_whole_numbers_and_lists_of_other_json_writers_are_the_same_spec() -> None:
    short: Any = [1, 2]
    assert LongRope(short, (3, 4), 8) == LongRope((1.0, 2.0), (3.0, 4.0), 8)
    data = {"spec": "LongRope", "short": [1], "long": [2], "trained_length": 8, "factor": 4}
    assert LongRope.from_json(data) == LongRope((1.0,), (2.0,), 8, 4.0)
    assert type(Rope(10).theta) is float
    assert hash(Rope(10)) == hash(Rope(10.0))


def test_a_spec_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SPEC.dim = 3  # pyright: ignore[reportAttributeAccessIssue]


# --- what is refused, each in one line that says where ---


def refused(data: Any) -> str:
    with pytest.raises(SpecError) as caught:
        Model.from_json(data)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def changed(path: str, value: Any) -> dict:
    """The JSON of SPEC with one value changed, along keys and indices."""
    data = json.loads(json.dumps(SPEC.to_json()))
    *way, last = path.split(".")
    node = data
    for key in way:
        node = node[int(key) if isinstance(node, list) else key]
    node[last] = value
    return data


ATTENTION = "decoder.blocks.0.of.sublayers.0.op"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("dime", 3, "dime: unknown key of Model (did you mean 'dim'?)"),
        (f"{ATTENTION}.head", 4,
         "decoder.blocks.0.sublayers.0.op.head: unknown key of Attention (did you mean 'heads'?)"),
        (f"{ATTENTION}.heads", "4", "decoder.blocks.0.sublayers.0.op: Attention.heads: expected int, got '4'"),
        (f"{ATTENTION}.heads", 4.0, "Attention.heads: expected int, got 4.0"),
        (f"{ATTENTION}.heads", True, "Attention.heads: expected int, got True"),
        (f"{ATTENTION}.causal", 1, "Attention.causal: expected bool, got 1"),
        (f"{ATTENTION}.scale", float("nan"), "Attention.scale: expected float or None, got nan"),
        (f"{ATTENTION}.scale", 10**400, "Attention.scale: expected float or None, got 1000"),
        (f"{ATTENTION}.heads", 3, "decoder.blocks.0.sublayers.0.op: Attention: heads=3 is not a multiple of kv_heads"),
        (f"{ATTENTION}.kv_heads", 0, "heads and kv_heads must be above 0"),
        (f"{ATTENTION}.head_size", 0, "head_size must be above 0"),
        (f"{ATTENTION}.window", 0, "window=0 hides everything"),
        (f"{ATTENTION}.keep_first", -1, "keep_first"),
        (f"{ATTENTION}.softcap", 0.0, "softcap must be above 0"),
        (f"{ATTENTION}.dropout", 1.0, "dropout is a share"),
        (f"{ATTENTION}.spec", "Atention",
         "decoder.blocks.0.sublayers.0.op: unknown spec 'Atention' (did you mean 'Attention'?)"),
        (f"{ATTENTION}.spec", 3, "a spec needs the key 'spec'"),
        (f"{ATTENTION}.spec", "Head", "decoder.blocks.0.sublayers.0.op.heads: unknown key of Head"),
        ("decoder.blocks.0.repeat", 0, f"decoder.blocks.0.repeat: expected a count from 1 to {MAX_PARTS}, got 0"),
        ("decoder.blocks.0.repeat", 2.0, "decoder.blocks.0.repeat: expected a count"),
        ("decoder.blocks.0.repeat", True, "decoder.blocks.0.repeat: expected a count"),
        ("decoder.blocks.0.repeat", 10**9, "decoder.blocks.0.repeat: expected a count"),
        ("decoder.blocks.0.repeat", MAX_PARTS, f"decoder.blocks.0: more than {MAX_PARTS} parts"),
        ("decoder.blocks", "many", "decoder: Trunk.blocks: expected tuple"),
        ("decoder.blocks", [1], "decoder: Trunk.blocks: expected tuple"),
        ("decoder.blocks", None, "decoder: Trunk.blocks: expected tuple"),
        ("decoder", {}, "decoder: a spec needs the key 'spec'"),
        ("decoder", [], "Model.decoder: expected Trunk or None"),
        ("decoder", None, "a model needs an encoder or a decoder"),
        ("decoder.norm", {"spec": "Init"}, "decoder: Trunk.norm: expected Part or None"),
        ("decoder.embed", {"spec": "Embed"}, "decoder.embed.vocab: Embed needs this key"),
        ("decoder.embed.types", -1, "types"),
        ("dim", -1, "dim must be above 0"),
        ("init.std", -0.5, "std must be above 0"),
        ("init.embedding", -0.5, "embedding"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_its_path(path: str, value: Any, message: str) -> None:
    assert message in refused(changed(path, value))


@pytest.mark.parametrize("data", [None, 3, "Model", [], {}, [{"spec": "Model"}], {"spec": None}, {"spec": "Rope"},
                                  {"spec": ["Model"]}, {"spec": "Spec"}, {"spec": "Model"}], ids=repr)  # fmt: skip
def test_what_is_no_model_is_refused(data: Any) -> None:
    refused(data)


def nested(depth: int, inner: Any, wrap: Any) -> Any:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def as_op(inner: Any) -> dict:
    """A trunk inside a sublayer's op, a thousand times over."""
    block = {"spec": "Block", "sublayers": [{"spec": "Sublayer", "name": "a", "op": inner}]}
    return {"spec": "Trunk", "embed": {"spec": "Embed", "vocab": 2}, "blocks": [{"repeat": 1000, "of": block}]}


@pytest.mark.parametrize(
    "op",
    [
        nested(300, {"spec": "Attention", "heads": 1}, as_op),
        nested(5, {"spec": "Attention", "heads": 1}, as_op),
        nested(900, 1, lambda inner: [inner]),
        nested(900, {}, lambda inner: {"spec": "Sublayer", "name": "a", "op": inner}),
        nested(900, {}, lambda inner: {"a": inner}),
        nested(5, 1, lambda inner: [{"repeat": 1000, "of": inner}]),
        [{"repeat": MAX_PARTS, "of": 1}] * 1000,
        {f"key{i}": 1 for i in range(100_000)},
        "x" * 1_000_000,
    ],
    ids=["deep trunks", "a thousand to the fifth", "deep lists", "deep specs", "deep objects", "deep repeats",
         "many repeats", "many keys", "long text"],
)  # fmt: skip
def test_hostile_json_is_refused_at_once(op: Any) -> None:
    """Neither the stack nor the memory is at the mercy of a file."""
    refused(changed(ATTENTION, op))
    refused(op)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*KEYS, "", "heads", "repeat"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["spec", "repeat", "of", "dim", "heads", "decoder", "blocks", "op"]), inner
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_a_model_or_a_spec_error(data: Any) -> None:
    with suppress(SpecError):  # most raise; anything else that is raised fails
        Model.from_json(data)


# --- overrides ---


def test_an_override_walks_fields_names_and_indices() -> None:
    spec = tiny(layers=3)
    assert spec.override("dim=64").dim == 64
    assert spec.override(dim=64) == spec.override("dim=64") == spec.override("dim = 64".replace(" =", "="))
    for path in ("decoder.blocks.1.attn.op.window", "decoder.blocks.1.sublayers.0.op.window",
                 "decoder.blocks.1.sublayers.attn.op.window"):  # fmt: skip
        windows = [block.sublayers[0].op.window for block in spec.override(f"{path}=8").find("decoder.blocks")]
        assert windows == [None, 8, None]


def test_a_star_is_every_element_that_has_the_rest_of_the_path() -> None:
    spec = SPEC.override("decoder.blocks.*.attn.op.window=8", "decoder.blocks.*.sublayers.*.pre.eps=0.5")
    assert {block.sublayers[0].op.window for block in spec.find("decoder.blocks")} == {8}
    assert {sublayer.pre.eps for block in spec.find("decoder.blocks") for sublayer in block.sublayers} == {0.5}
    only_attention = SPEC.override("decoder.blocks.*.sublayers.*.op.window=8")
    assert only_attention == SPEC.override("decoder.blocks.*.attn.op.window=8")


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("tied=true", "tied", True),
        ("decoder.norm=null", "decoder.norm", None),
        ("decoder.blocks.0.attn.name=mix", "decoder.blocks.0.sublayers.0.name", "mix"),
        ('decoder.blocks.0.attn.name="mix"', "decoder.blocks.0.mix.name", "mix"),
        ("decoder.blocks.0.ffn.op.activation=relu", "decoder.blocks.0.ffn.op.activation", "relu"),
        ("decoder.norm.eps=1", "decoder.norm.eps", 1.0),
        ('decoder.norm={"spec": "LayerNorm", "bias": false}', "decoder.norm", LayerNorm(bias=False)),
        ("decoder.blocks=[]", "decoder.blocks", ()),
    ],
)
def test_values_are_json_or_plain_text(change: str, path: str, value: Any) -> None:
    assert SPEC.override(change).find(path) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dim", "dim: an override reads path=value"),
        ("=3", ": unknown key of Model"),
        ("dmi=3", "dmi: unknown key of Model (did you mean 'dim'?)"),
        ("decoder.blocks.0.atn.op.window=3", "decoder.blocks.0.atn: unknown key of Block (did you mean 'attn'?)"),
        ("decoder.blocks.0.att.op.window=3", "decoder.blocks.0.att: unknown key of Block (did you mean 'attn'?)"),
        ("decoder.blocks.2.attn.op.window=3", "decoder.blocks.2: no such element (there are 2, from 0)"),
        ("decoder.blocks.-1.attn.op.window=3", "decoder.blocks.-1: no such element"),
        ("decoder.blocks.*.attn.op.widow=3", "attn.op.widow: unknown key of Attention (did you mean 'window'?)"),
        ("dim.more=3", "dim.more: dim is 32 and has no parts"),
        ("dim=64.5", "Model.dim: expected int, got 64.5"),
        ("dim=wide", "Model.dim: expected int, got 'wide'"),
        ("decoder.blocks.*.attn.op.heads=3", "attn.op: Attention: heads=3 is not a multiple"),
        ('decoder.norm={"spec": "LayerNrm"}', "decoder.norm: unknown spec 'LayerNrm' (did you mean 'LayerNorm'?)"),
        ('decoder.norm={"spec": "LayerNorm", "epsilon": 1}', "decoder.norm.epsilon: unknown key of LayerNorm"),
        ("decoder.norm=" + "[" * 100_000, "decoder.norm: nested deeper"),
        ("decoder.norm=" + '{"a":' * 100_000, "decoder.norm: nested deeper"),
        ("decoder.embed.*=3", "decoder.embed.*: unknown key of Embed"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_meant_is_one_line(change: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        SPEC.override(change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(models(), st.integers(1, 9))
def test_an_override_changes_what_it_names_and_nothing_else(spec: Model, dim: int) -> None:
    found = spec.override(f"dim={dim}")
    assert found.dim == dim
    assert found.replace(dim=spec.dim) == spec


def test_find_reads_what_override_writes() -> None:
    assert SPEC.find("decoder.blocks.1.attn.op.heads") == 4
    assert SPEC.find("decoder.blocks") is getattr(SPEC.decoder, "blocks", None)
    with pytest.raises(SpecError, match="decoder.bloks: unknown key of Trunk"):
        SPEC.find("decoder.bloks")


def test_replace_checks_again_and_names_unknown_keys() -> None:
    with pytest.raises(SpecError, match="Attention.head: unknown key .did you mean 'heads'"):
        Attention(4).replace(head=3)
    with pytest.raises(SpecError, match="not a multiple"):
        Attention(4).replace(kv_heads=3)


# --- text ---


def test_the_tree_of_a_model_is_frozen() -> None:
    """What `sublayer show` prints: equal neighbours once, defaults left out."""
    spec = tiny(layers=4, window=(None, 8, 8, None), rope=Rope(5e5, scaling=Linear(2.0)))
    assert spec.tree() == "\n".join(
        [
            "Model  dim=32, init=Init(residual='depth')",
            "└─ decoder: Trunk  embed=Embed(vocab=97), norm=RMSNorm(eps=1e-05)",
            "   ├─ 0: Block",
            "   │  ├─ attn: Sublayer  pre=RMSNorm(eps=1e-05)",
            "   │  │  └─ op: Attention  heads=4, kv_heads=2",
            "   │  │     └─ position: Rope  theta=500000.0, scaling=Linear(factor=2.0)",
            "   │  └─ ffn: Sublayer  op=FeedForward(hidden=48, activation='silu', gated=True), pre=RMSNorm(eps=1e-05)",
            "   ├─ 1–2: Block",
            "   │  ├─ attn: Sublayer  pre=RMSNorm(eps=1e-05)",
            "   │  │  └─ op: Attention  heads=4, kv_heads=2, window=8",
            "   │  │     └─ position: Rope  theta=500000.0, scaling=Linear(factor=2.0)",
            "   │  └─ ffn: Sublayer  op=FeedForward(hidden=48, activation='silu', gated=True), pre=RMSNorm(eps=1e-05)",
            "   └─ 3: Block",
            "      ├─ attn: Sublayer  pre=RMSNorm(eps=1e-05)",
            "      │  └─ op: Attention  heads=4, kv_heads=2",
            "      │     └─ position: Rope  theta=500000.0, scaling=Linear(factor=2.0)",
            "      └─ ffn: Sublayer  op=FeedForward(hidden=48, activation='silu', gated=True), pre=RMSNorm(eps=1e-05)",
        ]
    )


def test_the_tree_in_the_documentation_is_the_one_that_is_printed() -> None:
    page = (Path(__file__).parent.parent / "docs/specs.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0], names)
    assert f"```\n{names['spec'].tree()}\n```" in page
    assert f"# {names['spec'].parameters()}:" in page


def test_the_json_of_a_model_is_frozen() -> None:
    """Files written today are read for ever: this text is one of them."""
    text = """{"spec": "Model", "dim": 32, "decoder": {"spec": "Trunk", "embed": {"spec": "Embed", "vocab": 97},
    "blocks": [{"repeat": 2, "of": {"spec": "Block", "sublayers": [
      {"spec": "Sublayer", "name": "attn", "pre": {"spec": "LayerNorm", "eps": 1e-05}, "op":
        {"spec": "Attention", "heads": 4, "bias": true, "window": 8, "position": {"spec": "Rope", "theta": 10000}}},
      {"spec": "Sublayer", "name": "ffn", "post": {"spec": "RMSNorm"}, "op": {"spec": "FeedForward", "hidden": 48}}]}}],
    "norm": {"spec": "LayerNorm", "eps": 1e-05}}, "tied": true, "init": {"spec": "Init", "std": "fan_in"}}"""
    attention = Sublayer("attn", Attention(4, bias=True, window=8, position=Rope()), pre=LayerNorm())
    block = Block((attention, Sublayer("ffn", FeedForward(48), post=RMSNorm())))
    trunk = Trunk(Embed(97), repeat(block, 2), LayerNorm())
    assert Model.from_json(json.loads(text)) == Model(32, trunk, tied=True, init=Init("fan_in"))


def test_two_specs_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two specs are named Rope"):
        type("Rope", (Spec,), {"__module__": "elsewhere"})
    assert Spec._tags["Rope"] is Rope


def test_recipes_of_one_size_are_one_value() -> None:
    assert gpt2(**TINY_GPT2) == gpt2(**TINY_GPT2)
    assert len({SPEC, tiny(), gpt2(**TINY_GPT2)}) == 2
    assert {Ntk(2.0), DynamicNtk(2.0, 8), Ntk(2)} == {Ntk(2.0), DynamicNtk(2.0, 8)}
