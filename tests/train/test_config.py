"""Configurations of runs: strict, with the key in every error."""

from pathlib import Path

import pytest

from sublayer.errors import SublayerError, UsageError
from sublayer.nn.embed import Embed
from sublayer.nn.rope import Rope
from sublayer.train.config import Run, RunSource, read_run, run_of
from sublayer.train.optim import AdamW, Muon
from sublayer.train.schedule import Schedule

PLAIN = """
out = "mine"

[model]
recipe = "llama"
dim = 32
layers = 2
heads = 4
kv_heads = 2
hidden = 48

[data]
paths = "text"

[train]
tokens = 10_000
batch = 4
"""


def written(tmp_path: Path, text: str = PLAIN) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_run(tmp_path: Path) -> None:
    run = read_run(written(tmp_path))
    assert dict(run.model.sizes) == {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
    assert (run.data.all_sources(), run.seed) == ((RunSource("text", name=""),), 0)
    assert run.steps == -(-10_000 // (4 * 256))
    assert Run.from_json(run.to_json()) == run
    spec = run.model.build_spec(vocab=99)
    assert (spec.dim, spec.vocab, len(spec.find("decoder.blocks"))) == (32, 99, 2)


def test_changes_have_the_last_word(tmp_path: Path) -> None:
    run = read_run(
        written(tmp_path),
        [
            "steps=7", "seed=5", "model.dim=64", "optimizer.kind=muon", "optimizer.rate=0.02",
            "optimizer.rest.rate=1e-3", "schedule.shape=wsd", 'data.paths=["a", "b"]', "model.change=tied=true",
        ],
    )  # fmt: skip
    assert (run.train.steps, run.train.tokens, run.seed, run.steps) == (7, None, 5, 7)
    assert run.optimizer == Muon(rate=0.02, rest=AdamW(rate=1e-3))
    assert run.schedule == Schedule(shape="wsd")
    assert run.data.paths == ("a", "b")
    spec = run.model.build_spec(vocab=50)
    assert (spec.dim, spec.tied) == (64, True)


def test_weighted_sources() -> None:
    table = {"paths": ["a"], "weight": 2}, {"paths": "b", "field": "body"}
    run = run_of({"out": "x", "model": {"size": "gpt2-124m"}, "data": {"sources": list(table)}, "train": {"steps": 1}})
    expected = (RunSource(("a",), 2.0, name="source-0"), RunSource("b", field="body", name="source-1"))
    assert run.data.all_sources() == expected


def test_a_published_size_takes_the_vocabulary_of_the_tokenizer() -> None:
    run = run_of({"out": "x", "model": {"size": "gpt2-124m"}, "data": {"paths": "a"}, "train": {"steps": 1}})
    spec = run.model.build_spec(vocab=1000)
    assert (spec.dim, spec.vocab, spec.context) == (768, 1000, 1024)
    assert isinstance(spec.embedding, Embed)


def test_a_file_of_a_spec_is_taken_as_it_is(tmp_path: Path) -> None:
    import json

    import sublayer

    spec = sublayer.recipes.llama(16, 1, 2, 1, hidden=24, vocab=30)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    table = {"model": {"file": str(tmp_path / "spec.json")}, "data": {"paths": "a"}, "train": {"steps": 1}}
    assert run_of({"out": "x", **table}).model.build_spec(vocab=29) == spec


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.stepz=1"], "train.stepz: unknown key (did you mean 'steps'?)"),
        (["data.sources.0.path=1"], "data.sources.0"),
        (["batsh=1"], "batsh: unknown key (did you mean 'batch'?)"),
        (["every=5"], "every is in eval and save: say which"),
        (["train.batch=many"], "train.batch: expected int, got 'many'"),
        (["train.batch=0"], "train: batch is at least 1, got 0"),
        (["optimizer.kind=adam"], "optimizer.kind: unknown: 'adam' (did you mean 'adamw'?)"),
        (["optimizer.kind=muon", "optimizer.rest.betas=[0.9]"], "optimizer.rest.betas: expected"),
        (["schedule.shape=square"], "schedule.shape: expected"),
        (["data.paths=none"], "data: needs paths or sources, and not both"),
        (["data.held=0.9"], "data: held is a share above 0 and up to 0.5, got 0.9"),
        (["model.recipe=none"], "model: needs one of recipe, size, file and start, got none"),
        (["out=none"], "out: this key is needed"),
        (["save.best=true", "save.average=2"], "save: best and average exclude each other"),
        (["train.ema=0.9", "save.best=true"], "train.ema, save.best and save.average exclude one another"),
        (
            ['data.sources=[{paths="a", name="x"}, {paths="b", name="x"}]', "data.paths=none"],
            "two sources are named 'x'",
        ),
        (['data.sources=[{paths="a", name="../x"}]', "data.paths=none"], "name is a word of letters"),
        (["data.prefix=Say: "], "data.prefix: the objective next_token has no use for it"),
        (["data.judge=a"], "data.judge: the objective next_token has no use for it"),
        (["objective=tagging", "data.prefix=a"], "data.prefix: the objective tagging has no use for it"),
        (["objective=classification", "data.size=8"], "data.size: the objective classification has no use for it"),
        (["objective=masked", "eval.stride=8"], "eval.stride: the objective masked has no use for it"),
        (["objective=diffusion", "eval.sample=a"], "train.tokens: the objective diffusion has no use for it"),
        (["objective=diffusion", "train.steps=1", "tokenizer.kind=bytes"], "tokenizer: the objective diffusion has no"),
        (['data.sources=[{paths="a", target="x"}]'], "data.sources.0.target: the objective next_token has no use"),
        (['data.sources=[{paths="a"}]', "data.field=x"], "data.field: with data.sources, each of them has its own"),
        (["train"], "train: a change reads key=value"),
        (["model.dim.x=2"], "model.dim.x: model.dim has no keys"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_its_key(changes: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_run(written(tmp_path), changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.dimm=3"], "model.dimm: the recipe llama has no such size (did you mean 'dim'?)"),
        (["model.hidden=none"], "model: the recipe llama needs hidden"),
        (["model.recipe=lama"], "unknown family 'lama' (did you mean 'llama'?)"),
        (["model.change=decoder.blocks.*.attn.op.windw=3"], "unknown key"),
        (["model.heads=5"], "heads"),
        (["model.layers=two"], "model.layers: expected int, got 'two'"),
        (["model.dim=12.5"], "model.dim: expected int, got 12.5"),
        (['model.rope={spec="Ropes"}'], "model.rope: unknown spec 'Ropes' (did you mean 'Rope'?)"),
        (['model.rope={spec="RMSNorm"}'], "model.rope: expected Rope, got RMSNorm()"),
    ],
)
def test_a_model_that_cannot_be_is_told(changes: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(SublayerError) as caught:
        read_run(written(tmp_path), changes).model.build_spec(vocab=10)
    assert said in str(caught.value)


def test_a_file_that_is_no_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not TOML"):
        read_run(written(tmp_path, "out ="))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_run(tmp_path / "other.toml")
    with pytest.raises(UsageError, match="out: this key is needed"):
        read_run(written(tmp_path, ""))


def test_the_page_on_training_names_every_key() -> None:
    from sublayer.train import config

    docs = Path(__file__).parents[2] / "docs"
    page, objectives = ((docs / f"{name}.md").read_text() for name in ("training", "objectives"))
    for section, cls in config._sections():
        for key in config._hints(cls):
            where = objectives if section == "objective" else page
            named = f"`{section}.{key}`" if section not in ("optimizer", "objective") else f"`{key}`"
            assert named in where or key == "sizes", f"{section}.{key}"


def test_none_takes_a_value_away(tmp_path: Path) -> None:
    """Where a key may be empty it is; elsewhere it is as if it had not been given."""
    run = read_run(written(tmp_path), ["train.clip=none", "seed=none", "model.hidden=none", "model.hidden=64"])
    assert (run.train.clip, run.seed, dict(run.model.sizes)["hidden"]) == (None, 0, 64)


def test_a_part_of_a_recipe_is_a_table(tmp_path: Path) -> None:
    made = read_run(written(tmp_path), ['model.rope={spec="Rope", theta=5}']).model.build_spec(vocab=10)
    assert made.find("decoder.blocks.0.attn.op.position") == Rope(theta=5.0)


def test_a_recipe_may_have_a_kind(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN.replace('"llama"', '"rnn"').partition("heads")[0] + '[data]\npaths = "a"\n')
    made = read_run(path, ["model.kind=gru", "steps=1"]).model.build_spec(vocab=10)
    assert made.find("decoder.blocks.0.mixer.op.kind") == "gru"


def test_another_kind_of_optimiser_drops_the_keys_of_the_former(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN + '\n[optimizer]\nkind = "muon"\nrest = { rate = 1e-3 }\n')
    assert read_run(path, ["optimizer.kind=adamw"]).optimizer == AdamW()
    assert read_run(path, ["optimizer.kind=muon", "rate=0.5"]).optimizer == Muon(rate=0.5, rest=AdamW(rate=1e-3))


def test_one_of_two_ways_to_say_it_takes_the_place_of_the_other(tmp_path: Path) -> None:
    run = read_run(written(tmp_path), ["steps=5", "optimizer.rate=0.5", "model.start=folder"])
    assert (run.train.steps, run.train.tokens, run.optimizer) == (5, None, AdamW(rate=0.5))
    assert (run.model.recipe, run.model.start, run.model.sizes) == (None, "folder", ())


def test_a_mistake_on_the_command_line_is_not_laid_to_the_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_run(path, ["train.stepz=1"])
    assert str(caught.value).startswith("train.stepz: unknown key")
    with pytest.raises(UsageError) as caught:
        read_run(written(tmp_path, PLAIN + "\nstepz = 1\n"), ["seed=1"])
    assert str(caught.value).startswith(str(path))


def test_time_may_end_a_run(tmp_path: Path) -> None:
    path = written(tmp_path)
    run = read_run(path, ["seconds=2.5", "schedule.shape=constant"])
    assert (run.train.seconds, run.train.tokens, run.steps) == (2.5, None, None)
    assert read_run(path, ["seconds=480", "steps=3"]).steps == 3
    for change, said in {
        "seconds=9": "schedule.shape='cosine' falls towards the last step",
        "seconds=0": "train: seconds must be above 0",
    }.items():
        with pytest.raises(UsageError, match=said):
            read_run(path, [change])
    both = PLAIN.replace("[train]", "[train]\nseconds = 3")
    with pytest.raises(UsageError, match="needs steps, tokens or seconds, got tokens and seconds"):
        read_run(written(tmp_path, both))
