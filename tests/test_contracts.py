"""Every model through every contract; faults on purpose through the contract that has to see them."""

import ast
from pathlib import Path

import pytest
import torch

from sublayer.nn.attention import AttentionOp
from sublayer.recipes import CONTRACTS as NAMED
from sublayer.recipes import FAMILIES, family, names_of_sizes
from sublayer.recipes import model as published
from sublayer.state import State
from sublayer.step import Step
from tests.broken import BROKEN, Broken, around, window_plus_one
from tests.case import EXACT, alone, assert_near, rough, with_its_past
from tests.cases import CASES
from tests.contracts import CONTRACTS, compiled
from tests.language import beats_unigrams

KIB = 1024
# (parameters, bytes of state a token in 2-byte elements), from the papers, model cards and published checkpoints.
PUBLISHED = {
    "bert-base": (109_482_240, 0),  # encoder and pooler
    "bert-large": (335_141_888, 0),
    "roberta-base": (124_645_632, 0),
    "roberta-large": (355_359_744, 0),
    "dit-s2": (32_865_056, 0),
    "dit-b2": (130_315_808, 0),
    "dit-l2": (457_840_672, 0),
    "dit-xl2": (674_834_720, 0),  # the authors count 256 fixed positions too: 675,129,632
    "dinov2-s": (22_056_576, 0),
    "dinov2-b": (86_580_480, 0),
    "dinov2-l": (304_368_640, 0),
    "dinov2-g": (1_136_480_768, 0),
    "dinov2-s-registers": (22_058_112, 0),
    "dinov2-b-registers": (86_583_552, 0),
    "dinov2-l-registers": (304_372_736, 0),
    "dinov2-g-registers": (1_136_486_912, 0),
    # by arithmetic: 48 blocks of 1,829,952, the front end's 31,872 and the two heads' 14,167
    "evoformer-48": (87_883_735, 0),
    "gemma-2b": (2_506_172_416, 18 * KIB),
    "gemma-7b": (8_537_680_896, 448 * KIB),
    "gemma2-2b": (2_614_341_888, 104 * KIB),
    "gemma2-9b": (9_241_705_984, 336 * KIB),
    "gemma2-27b": (27_227_128_320, 368 * KIB),
    "gemma3-270m": (268_098_176, 18 * KIB),
    "gemma3-1b": (999_885_952, 26 * KIB),
    # the published 4,300,079,472, 12,187,325,040 and 27,432,406,640 without 416,866,032 of the vision tower and
    # 1,152 · (D + 1) of the projector
    "gemma3-4b": (3_880_263_168, 136 * KIB),
    "gemma3-12b": (11_766_034_176, 384 * KIB),
    "gemma3-27b": (27_009_346_304, 496 * KIB),
    "embeddinggemma-300m": (302_863_104, 0),
    # By transformers' classes with the published configurations; which the cards round.
    "deberta-base": (138_601_728, 0),
    "deberta-large": (405_163_008, 0),
    "deberta-v2-xlarge": (884_593_152, 0),
    "deberta-v2-xxlarge": (1_564_549_632, 0),
    "deberta-v3-xsmall": (70_682_112, 0),
    "deberta-v3-small": (141_304_320, 0),
    # as transformers' own classes count on meta, with the 58 · 256 biases of the choice that are buffers there
    "deepseek-v3": (671_026_419_200, 70_272),
    "deepseek-v2": (235_741_434_880, 69_120),
    "deepseek-v2-lite": (15_706_484_224, 31_104),
    "deberta-v3-base": (183_831_552, 0),
    "deberta-v3-large": (434_012_160, 0),
    "modernbert-base": (149_655_232, 0),
    "modernbert-large": (395_881_664, 0),
    # by arithmetic; with towers for images and sound the authors round to 5.1B and 8B, and without to 30.7B
    "gemma4-e2b": (4_628_569_379, 18 * KIB),
    "gemma4-e4b": (7_463_013_418, 56 * KIB),
    "gemma4-31b": (30_697_345_340, 880 * KIB),
    "gpt2-124m": (124_439_808, 36 * KIB),
    "gpt2-355m": (354_823_168, 96 * KIB),
    "gpt2-774m": (774_030_080, 180 * KIB),
    "gpt2-1.5b": (1_557_611_200, 300 * KIB),
    "gpt3-175b": (174_604_259_328, 4608 * KIB),  # by arithmetic; the paper rounds to 175.0B
    # by arithmetic: the paper's heads are mixtures of logistics, ours logits
    "linear-transformer-mnist": (6_449_664, 0),
    "linear-transformer-cifar10": (12_767_744, 0),
    # as transformers' own classes count on meta
    "qwen3-next-80b-a3b": (79_674_391_296, 24 * KIB),
    "qwen3.5-0.8b": (752_393_024, 12 * KIB),
    "qwen3.5-27b": (26_895_998_464, 64 * KIB),
    "qwen3.5-122b-a10b": (122_111_526_912, 24 * KIB),
    "qwen3.5-397b-a17b": (396_346_350_336, 30 * KIB),
    "qwen3.5-9b": (8_953_803_264, 32 * KIB),
    "qwen3.5-35b-a3b": (34_660_610_688, 20 * KIB),
    # by arithmetic: the paper's 249M have adaptive embeddings of 38M, ours plain ones of 274M
    "s4-wikitext103": (210_028_544 + 1024 * 267_735, 0),
    "pythia-70m": (70_426_624, 12 * KIB),
    "pythia-160m": (162_322_944, 36 * KIB),
    "pythia-410m": (405_334_016, 96 * KIB),
    "pythia-1b": (1_011_781_632, 128 * KIB),
    "pythia-1.4b": (1_414_647_808, 192 * KIB),
    "pythia-2.8b": (2_775_208_960, 320 * KIB),
    "pythia-6.9b": (6_857_302_016, 512 * KIB),
    "pythia-12b": (11_846_072_320, 720 * KIB),
    "gpt-neox-20b": (20_554_567_680, 1056 * KIB),
    "llama2-7b": (6_738_415_616, 512 * KIB),
    "llama2-13b": (13_015_864_320, 800 * KIB),
    "llama2-70b": (68_976_648_192, 320 * KIB),
    "llama3-8b": (8_030_261_248, 128 * KIB),
    "llama3-70b": (70_553_706_496, 320 * KIB),
    "llama3.1-405b": (405_853_388_800, 504 * KIB),
    "llama3.2-1b": (1_235_814_400, 32 * KIB),
    "tinyllama-1.1b": (1_100_048_384, 22 * KIB),
    "smollm2-135m": (134_515_008, 45 * KIB // 2),
    "smollm3-3b": (3_075_098_624, 72 * KIB),
    "mistral-7b": (7_241_732_096, 128 * KIB),
    "olmo2-1b": (1_484_916_736, 128 * KIB),
    "olmo2-7b": (7_298_617_344, 512 * KIB),
    "olmo2-13b": (13_716_198_400, 800 * KIB),
    "olmo2-32b": (32_234_279_936, 256 * KIB),
    "phi3-mini": (3_821_079_552, 384 * KIB),
    "phi3-medium": (13_960_238_080, 200 * KIB),
    "phi4": (14_659_507_200, 200 * KIB),
    "qwen2.5-0.5b": (494_032_768, 12 * KIB),
    "mamba-130m": (129_135_360, 0),
    "mamba-370m": (371_516_416, 0),
    "mamba-790m": (793_204_224, 0),
    "mamba-1.4b": (1_372_178_432, 0),
    "mamba-2.8b": (2_768_345_600, 0),
    "mamba2-130m": (128_989_632, 0),
    "mamba2-370m": (368_346_624, 0),
    "mamba2-780m": (780_161_280, 0),
    "mamba2-1.3b": (1_343_757_312, 0),
    "mamba2-2.7b": (2_702_599_680, 0),
    "codestral-mamba-7b": (7_285_403_648, 0),
    "jamba-52b": (51_570_323_328, 16 * KIB),
    "jamba-1.5-large": (398_555_145_696, 36 * KIB),
    "bamba-9b": (9_780_235_392, 12 * KIB),
    "vit-s16": (22_050_664, 0),
    "vit-b16": (86_567_656, 0),
    "vit-l16": (304_326_632, 0),
    "convs2s-en-ro": (146_496_576, 0),  # by arithmetic
    "lstm-medium": (19_780_400, 0),  # by arithmetic, with torch's two biases a gate; 20M in the literature
    "lstm-large": (66_034_000, 0),  # 66M in the literature
    "sutskever-2014": (384_000_000, 0),
    "rnnsearch": (80_451_000, 0),  # by arithmetic
    "qwen3-0.6b": (596_049_920, 112 * KIB),
    "qwen3-1.7b": (1_720_574_976, 112 * KIB),
    "qwen3-4b": (4_022_468_096, 144 * KIB),
    "qwen3-8b": (8_190_735_360, 144 * KIB),
    "qwen3-14b": (14_768_307_200, 160 * KIB),
    "qwen3-32b": (32_762_123_264, 256 * KIB),
    "mixtral-8x7b": (46_702_792_704, 128 * KIB),
    "mixtral-8x22b": (140_620_634_112, 224 * KIB),
    # Without the encoder's sinusoids, as the authors' own code counts: transformers stores 1500 · D numbers more.
    "whisper-tiny": (37_184_640, 6 * KIB),
    "whisper-tiny.en": (37_184_256, 6 * KIB),
    "whisper-base": (71_825_920, 12 * KIB),
    "whisper-base.en": (71_825_408, 12 * KIB),
    "whisper-small": (240_582_912, 36 * KIB),
    "whisper-small.en": (240_582_144, 36 * KIB),
    "whisper-medium": (762_321_920, 96 * KIB),
    "whisper-medium.en": (762_320_896, 96 * KIB),
    "whisper-large": (1_541_384_960, 160 * KIB),
    "whisper-large-v3": (1_541_570_560, 160 * KIB),
    "whisper-large-v3-turbo": (806_958_080, 20 * KIB),
    # By arithmetic, biases included; the paper rounds to 65M and 213M.
    "transformer-base": (63_082_496, 12 * KIB),
    "transformer-big": (214_245_376, 24 * KIB),
    "opus-mt-en-de": (73_944_309, 12 * KIB),
    "t5-small": (60_506_624, 12 * KIB),
    "t5-base": (222_903_552, 36 * KIB),
    "t5-large": (737_668_096, 96 * KIB),
    "t5-3b": (2_851_598_336, 384 * KIB),
    "t5-11b": (11_307_321_344, 1536 * KIB),
    **{f"{line}-small": (76_961_152, 12 * KIB) for line in ("t5-v1.1", "flan-t5")},
    **{f"{line}-base": (247_577_856, 36 * KIB) for line in ("t5-v1.1", "flan-t5")},
    **{f"{line}-large": (783_150_080, 96 * KIB) for line in ("t5-v1.1", "flan-t5")},
    **{f"{line}-xl": (2_849_757_184, 192 * KIB) for line in ("t5-v1.1", "flan-t5")},
    **{f"{line}-xxl": (11_135_332_352, 384 * KIB) for line in ("t5-v1.1", "flan-t5")},
    "mt5-small": (300_176_768, 12 * KIB),
    "mt5-base": (582_401_280, 36 * KIB),
    "mt5-large": (1_229_581_312, 96 * KIB),
    "mt5-xl": (3_742_619_648, 192 * KIB),
    "mt5-xxl": (12_921_057_280, 384 * KIB),
    "grok-1": (315_684_820_992, 256 * KIB),  # by arithmetic; xAI says 314B
    # of our own making, and by arithmetic: Llama 2 7B, 256 more ids twice, and an image of 256 patches
    "actions-small": (5_443_072, 6 * KIB),
    "actions-7b": (6_743_973_888, 512 * KIB),
    "megabyte-1.3b-350m": (1_513_605_120, 311_304),  # by arithmetic: the paper names the trunks' sizes alone
    "mixture-small": (4_874_752, 6 * KIB),  # of our own making
    # The paper says 7B for 128 experts at the base size, and 26B at the large one.
    "switch-base-8": (619_339_008, 36 * KIB),
    "switch-base-16": (1_072_397_568, 36 * KIB),
    "switch-base-32": (1_978_514_688, 36 * KIB),
    "switch-base-64": (3_790_748_928, 36 * KIB),
    "switch-base-128": (7_415_217_408, 36 * KIB),
    "switch-base-256": (14_664_154_368, 36 * KIB),
    "switch-large-128": (26_309_291_008, 96 * KIB),
    "qwen3-30b-a3b": (30_532_122_624, 96 * KIB),
    "qwen3-235b-a22b": (235_093_634_560, 188 * KIB),
    "gpt-oss-20b": (20_914_757_184, 48 * KIB),
    "gpt-oss-120b": (116_829_156_672, 72 * KIB),
}
ACTIVE = {
    "deepseek-v3": 37_552_297_472,
    "deepseek-v2": 21_375_800_320,
    "deepseek-v2-lite": 2_661_150_208,
    "jamba-52b": 12_110_311_296,
    "jamba-1.5-large": 94_149_338_592,
    "mixtral-8x7b": 12_879_925_248,
    "mixtral-8x22b": 39_152_031_744,
    "qwen3-next-80b-a3b": 3_874_929_408,
    "qwen3.5-35b-a3b": 3_454_988_928,
    "grok-1": 83_756_587_008,
    "qwen3-30b-a3b": 3_353_032_704,
    "switch-base-8": 222_977_280,  # T5's own, and routers
    "qwen3-235b-a22b": 22_190_763_520,
    "gpt-oss-20b": 4_187_440_704,  # the model card's 3.61B and 5.13B leave out the embedding's 0.58B
    "gpt-oss-120b": 5_711_982_912,
    "qwen3.5-122b-a10b": 9_771_288_576,
    "qwen3.5-397b-a17b": 17_349_040_896,
}  # parameters that a token goes through


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, contract: str) -> None:
    case = CASES[name]
    if contract in case.exempt:
        pytest.skip(case.exempt[contract])
    CONTRACTS[contract](case)


@pytest.mark.parametrize("contract", ["incremental", "packing", "padding"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("linear_transformer", "linear_attention.CHUNK"),
        ("linear attention both ways", "linear_attention.CHUNK"),
        ("mamba2", "ssd.CHUNK"),
        ("qwen3_5", "delta.CHUNK"),
        ("s4", "s4.BLOCK"),
    ],
)
def test_a_contract_holds_over_the_edges_of_chunks(name: str, size: str, contract: str, monkeypatch) -> None:
    """The documents of the contracts are shorter than a chunk as it is."""
    monkeypatch.setattr(f"sublayer.nn.{size}", 4)
    if contract not in CASES[name].exempt:
        CONTRACTS[contract](CASES[name])


@pytest.mark.parametrize("size", names_of_sizes())
def test_size(size: str) -> None:
    parameters, bytes_a_token = PUBLISHED[size]
    model = published(size).build(device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert State.allocate(model, 1, 16).bytes_per("token") == bytes_a_token
    if size in ACTIVE:
        assert published(size).active_parameters() == ACTIVE[size]


@pytest.mark.parametrize("name", FAMILIES)
def test_parity_is_tested(name: str) -> None:
    """Parity lives with the family: some test there holds the model against an independent implementation."""
    own = Path(__file__).parent / "recipes" / f"test_{name}.py"
    path = own if own.exists() else own.with_name("test_state_spaces.py")  # where four families share their tests
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path != own:
        assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    calls = {n.func.id for t in tests for n in ast.walk(t) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "check_parity" in calls


def test_each_contract_is_tested_and_each_exemption_has_a_reason() -> None:
    assert {*CONTRACTS, "size", "parity"} == set(NAMED)
    for case in CASES.values():
        assert case.exempt.keys() <= set(NAMED), case.name
        assert all(len(reason.split()) > 3 for reason in case.exempt.values()), case.name
    assert {name for name in FAMILIES if name not in CASES} == set()
    assert {name for name in FAMILIES if not family(name).SIZES} == set()


# --- what is slow in the contracts ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_decoding_is_one_graph_of_inductor(name: str) -> None:
    compiled(CASES[name], "inductor")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba"])
def test_some_steps_on_real_text_beat_unigrams(name: str) -> None:
    beats_unigrams(CASES[name].spec, steps=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.language_model])
def test_more_steps_on_real_text_beat_unigrams(name: str) -> None:
    beats_unigrams(CASES[name].spec, steps=150)


# --- the contracts themselves ---


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_op_fails_its_contract(broken: Broken) -> None:
    case = CASES[broken.case]
    with broken.fault():
        for name in broken.unseen:
            CONTRACTS[name](case)
        with pytest.raises(AssertionError) as caught:
            CONTRACTS[broken.contract](case)
    assert broken.where in "\n".join(getattr(caught.value, "__notes__", [])), "it failed elsewhere"


def test_a_window_too_wide_by_one_in_the_op_is_seen_by_no_contract_but_parity() -> None:
    """Both sides of every comparison share it, so the reference has to be another statement of the window: here an
    explicit mask on the same model without windows."""
    case = CASES["llama, windows"]
    model, free = rough(case), rough(case)
    for op in _attentions(free):
        op.spec = op.spec.replace(window=None)
    (document,) = case.documents(case, [15], 1)
    for window in (4, 6):
        for op in _attentions(model):
            op.spec = op.spec.replace(window=window)
        distance = torch.arange(15)[:, None] - torch.arange(15)
        expected = alone(free, document, Step(mask=distance < window))
        assert_near(alone(model, document), expected, EXACT[torch.float64])
        with around(AttentionOp, "_tokens", window_plus_one)(), pytest.raises(AssertionError):
            assert_near(alone(model, document), expected, EXACT[torch.float64])
    with around(AttentionOp, "_tokens", window_plus_one)():
        for name in ("incremental", "packing", "padding", "kernels", "compile"):
            CONTRACTS[name](case)


def _attentions(model: torch.nn.Module) -> list[AttentionOp]:
    return [module for module in model.modules() if isinstance(module, AttentionOp)]


@torch.no_grad()
def test_its_past_is_the_plain_forward_where_no_length_matters() -> None:
    case = CASES["llama"]
    model = rough(case)
    (document,) = case.documents(case, [12], 2)
    for calls in ([(0, 12)], [(0, 3), (3, 4), (4, 12)], [(0, 9), (5, 12)]):
        expected = alone(model, document)[calls[-1][0] :]
        assert_near(with_its_past(model, document, calls), expected, EXACT[torch.float64])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.length_dependent])
@torch.no_grad()
def test_with_one_layer_each_step_is_the_last_token_of_its_prefix(name: str) -> None:
    """Deeper layers keep keys made of vectors that were computed when the document was shorter. The first cannot."""
    case = CASES[name]
    model = rough(case)
    del model.get_submodule("decoder.blocks")["1"]  # pyright: ignore[reportIndexIssue]
    (document,) = case.documents(case, [14], 3)
    state, whole = State.allocate(model, 1, 14), alone(model, document)
    for i in range(14):
        logits = model(document.inputs[None, i : i + 1], Step(), state)
        prefix = model(document.inputs[None, : i + 1])
        assert_near(logits[0, -1], prefix[0, -1], EXACT[torch.float64])
    # Frequencies did change on the way, or the test would say nothing.
    assert not torch.allclose(whole[5], model(document.inputs[None, :6])[0, 5])
