"""The page that shows the families side by side says what the recipes say."""

from pathlib import Path

from sublayer import recipes
from sublayer.inspect.architectures import architecture, table

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_is_what_the_recipes_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(), "make it anew: sublayer recipes --page > docs/architectures.md"


def test_the_page_has_every_size_that_is_made_of_other_parts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in recipes.FAMILIES:
        assert f"| `{name}` | {next(iter(recipes.family(name).SIZES))} |" in page
    told = ("gemma2-2b", "embeddinggemma-300m", "llama3.1-405b", "qwen3.5-35b-a3b", "rnnsearch", "t5-v1.1-small")
    assert all(f"| {size} |" in page for size in told)
    alike = ("llama2-13b", "bert-large", "gemma3-12b", "qwen3.5-122b-a10b", "mamba-370m")
    assert not [size for size in alike if f"| {size} |" in page]
    assert "| additive attention in GRU | n m d + n d² | n | n |" in page
    assert "| Elman, LSTM, GRU | n d² | n | n |" in page


def test_an_architecture_is_read_off_its_spec() -> None:
    found = architecture(recipes.model("mixtral-8x7b"))
    assert found.mixers == ("causal grouped-query attention",)
    assert (found.positions, found.norms) == (("RoPE",), ("pre: RMSNorm",))
    assert found.ffn == ("8 experts of SwiGLU",)
    assert (found.parameters, found.active) == (46_702_792_704, 12_879_925_248)
    assert found.state_per_token == 128 * 1024
    post = architecture(recipes.model("bert-base"))
    assert (post.mixers, post.norms) == (("two-way multi-head attention",), ("post: LayerNorm",))
    scan = architecture(recipes.model("mamba-130m"))
    assert scan.state_per_token == 0
    assert scan.state_per_row > 0
    assert {grown.work for grown in scan.growth} <= {"n d s", "n k d"}
