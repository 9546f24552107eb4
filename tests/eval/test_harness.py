"""Requests of lm-evaluation-harness, answered as by its model of transformers on the same weights."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import sublayer
from sublayer.errors import UsageError
from sublayer.recipes import bert, llama
from sublayer.text import load_tokenizer, train_bpe

WORDS = "the cat sat on the mat and the dog sat on the log, said the frog; größer und größer. "
PAIRS = [
    ("the cat", " sat on the mat"),
    ("the cat ", "sat on the mat"),  # a space that belongs to what follows
    ("the cat  \n ", "and"),
    ("", "the dog"),
    ("the do", "g Q7 said nothing"),  # tokens that join across the boundary
    ("größ", "er und größer"),
    ("a<|end|>b", " the log"),
    ("<|end|>the", " cat"),
    (WORDS * 3, " said the frog"),  # more than is read
    *[("Which? A, B or C:", f" {letter}") for letter in "ABC"],
]
LENGTH = 32

TEXTS = ["the cat", WORDS, WORDS * 4, "ö" * 90]

pytestmark = pytest.mark.slow  # the harness and what it brings take many seconds to import


@pytest.fixture(scope="module", params=["framed", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer begins each text by itself, and one whose does not."""
    folder = tmp_path_factory.mktemp(request.param)
    train_bpe([WORDS * 20], 290, end="<|end|>").save(folder)
    tokenizer = load_tokenizer(folder)
    sublayer.save(llama(32, 2, 4, 2, hidden=64, vocab=tokenizer.size).build(seed=3), folder, layout="hf")
    config = json.loads((folder / "config.json").read_text())
    more = {"max_position_embeddings": LENGTH, "eos_token_id": tokenizer.eos[0]}
    (folder / "config.json").write_text(json.dumps(config | more))
    if request.param == "plain":
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Any:
    from sublayer.eval.harness import SublayerLM

    return SublayerLM(folder, dtype="float64")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """Without its cache, which takes the wrong position where continuations of two lengths read the same tokens."""
    return import_module("lm_eval.models.huggingface").HFLM(
        pretrained=str(folder), dtype="float64", device="cpu", batch_size=3, logits_cache=False
    )


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_continuations_have_the_same_ids_and_log_likelihoods(ours: Any, theirs: Any) -> None:
    for context, continuation in PAIRS:
        if context:
            assert ours._encode_pair(context, continuation) == theirs._encode_pair(context, continuation)
    asked = requests("loglikelihood", PAIRS)
    found, expected = (model.loglikelihood(asked, disable_tqdm=True) for model in (ours, theirs))
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=1e-6)
    assert [best for _, best in found] == [best for _, best in expected]


def test_continuations_that_are_the_best_are_told_so(ours: Any, theirs: Any) -> None:
    contexts = [WORDS[:end] for end in range(3, 40)]
    asked = requests("generate_until", [(context, {"max_gen_toks": 1}) for context in contexts])
    said = ours.generate_until(asked, disable_tqdm=True)
    pairs = [(context, one) for context, one in zip(contexts, said, strict=True) if one.strip()]
    asked = requests("loglikelihood", pairs)
    found, expected = (model.loglikelihood(asked, disable_tqdm=True) for model in (ours, theirs))
    assert [best for _, best in found] == [best for _, best in expected]
    assert {best for _, best in found} == {True, False}


def test_a_continuation_that_joins_its_context_to_nothing_is_asked_apart(ours: Any) -> None:
    before, after = ours._encode_pair("the ca", "t")
    assert before == ours.tok_encode("the ca")
    assert ours.tok_encode("the cat")[len(before) :] == []
    assert after == ours.tok_encode("t", add_special_tokens=False)


def test_a_context_of_spaces_goes_to_the_continuation(ours: Any) -> None:
    for spaces in (" ", "\n \n"):
        found, expected = ours.loglikelihood(
            requests("loglikelihood", [(spaces, "the cat"), ("", f"{spaces}the cat")]), disable_tqdm=True
        )
        assert found == expected  # where theirs stops, unless the tokenizer begins each text by itself


def test_what_a_tokenizer_puts_behind_a_text_is_not_asked(folder: Path, ours: Any, tmp_path: Path) -> None:
    from sublayer.eval.harness import SublayerLM

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path, end = tmp_path / "tokenizer.json", ours.ours.eos[0]
    ended = [*load_tokenizer(folder).encode("", framed=True), end]
    pieces: list[Any] = [{"SpecialToken": {"id": "<|end|>", "type_id": 0}} for _ in ended]
    single = [*pieces[1:], {"Sequence": {"id": "A", "type_id": 0}}, pieces[0]]
    special = {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    other = SublayerLM(tmp_path, dtype="float64")
    assert other.ours.encode("the cat", framed=True)[-1] == end
    for kind, given in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [(text,) for text in TEXTS])):
        found, expected = (getattr(model, kind)(requests(kind, given), disable_tqdm=True) for model in (other, ours))
        assert found == expected


def test_whole_texts_have_the_same_log_likelihoods(ours: Any, theirs: Any) -> None:
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    found, expected = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in (ours, theirs))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": ["e", "<|end|>"], "do_sample": False, "max_gen_toks": 12},
        {"until": "o", "max_new_tokens": 7, "temperature": 0.0},
    ],
    ids=str,
)
def test_answers_are_the_same(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    contexts = ["the cat", "and the dog sat", WORDS * 2]
    asked = requests("generate_until", [(context, dict(options)) for context in contexts])
    found, expected = (model.generate_until(asked, disable_tqdm=True) for model in (ours, theirs))
    assert found == expected


def test_drawn_answers_repeat_with_the_seed_and_differ_between_requests(ours: Any) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_gen_toks": 12}
    asked = requests("generate_until", [("the cat", options)] * 3)

    def drawn(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return ours.generate_until(asked, disable_tqdm=True)

    assert drawn(5) == drawn(5) != drawn(7)
    assert len(set(drawn(5))) == 3


def test_chat_templates_give_the_same_prompts(folder: Path, ours: Any, theirs: Any) -> None:
    template = (
        "{% for m in messages %}<|end|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|end|>assistant: {% endif %}"
    )
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    theirs.tokenizer.chat_template = template
    assert ours.chat_template(True) == theirs.chat_template(True)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
    for messages, answer in ((turns[:1], True), (turns, False)):
        found, expected = (model.apply_chat_template(messages, answer) for model in (ours, theirs))
        assert found == expected
        assert ours.tok_encode(found) == theirs.tok_encode(found)


def test_what_a_request_cannot_mean_is_refused(ours: Any) -> None:
    for options, told in (({"tempreture": 1}, "temperature"), ({"max_gen_toks": LENGTH}, "leaves no room")):
        with pytest.raises(UsageError, match=told):
            ours.generate_until(requests("generate_until", [("a", options)]), disable_tqdm=True)
    with pytest.raises(UsageError, match="more than the 32"):
        ours.loglikelihood(requests("loglikelihood", [("a", " the cat" * 40)]), disable_tqdm=True)


def test_models_that_give_no_probability_are_refused(tmp_path: Path) -> None:
    from sublayer.eval.harness import SublayerLM

    sublayer.save(bert(32, 1, 4, vocab=257).build(), tmp_path)
    with pytest.raises(UsageError, match="from both sides"):
        SublayerLM(tmp_path)


TASK = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PERPLEXITY = """
task: sayings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


def test_tasks_of_local_files_come_to_the_same(
    folder: Path, ours: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    simple_evaluate = import_module("lm_eval").simple_evaluate
    questions = [
        {"question": f"{start} sat on the", "choices": ["mat", "log", "größer und"], "answer": number % 3}
        for number, start in enumerate(["the cat", "the dog", "and the frog", "said the cat", "the mat"])
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for name, task in (("animals", TASK), ("sayings", PERPLEXITY)):
        (tmp_path / f"{name}.yaml").write_text(task.format(questions=tmp_path / "questions.jsonl"))
    tasks = import_module("lm_eval.tasks").TaskManager(include_path=str(tmp_path), include_defaults=False)
    options: dict[str, Any] = {"tasks": ["animals", "sayings"], "task_manager": tasks, "bootstrap_iters": 0}
    found, expected = (simple_evaluate(model, **options) for model in (ours, theirs))
    for name, result in expected["results"].items():
        for metric, value in result.items():
            assert found["results"][name][metric] == (pytest.approx(value) if isinstance(value, float) else value)
    assert found["results"]["sayings"]["bits_per_byte,none"] > 1
    named = simple_evaluate("sublayer", model_args={"pretrained": str(folder), "dtype": "float64"}, **options)
    assert named["results"] == found["results"]


def test_the_harness_knows_its_own_models_still() -> None:
    program = (
        "import sublayer.eval.harness; from lm_eval.api.registry import get_model;"
        "print([get_model(name).__name__ for name in ('sublayer', 'dummy')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['SublayerLM', 'DummyLM']\n", done.stderr


def test_nothing_else_needs_the_harness() -> None:
    program = (
        "import sys; import sublayer.eval, sublayer.cli.eval, sublayer.cli.main; sys.modules['lm_eval'] = None\n"
        "from sublayer.eval.__main__ import main; sys.exit(10 * ('torch' not in sys.modules) + main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "sublayer: lm_eval is not installed: pip install 'sublayer[eval]'\n"
