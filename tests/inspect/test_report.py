import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sublayer.errors import InputError
from sublayer.inspect.profile import Profile
from sublayer.inspect.report import Attention, Report, Sample, label, render, size, token_texts, visible, write_report
from sublayer.text import Bytes

EVIL = (
    "</pre><script>alert('x')</script><img src=http://example.com/x onerror=alert(1)>{{ 7*7 }} $\\frac{x}$ &amp; \" '"
)
WEIGHTS = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0)).tril()
WEIGHTS = WEIGHTS / WEIGHTS.sum(-1, keepdim=True)
PROFILE = Profile(
    {"attn": 0.3, "ffn": 0.5, "rest": 0.2}, 0.9, 1800, 40_000_000, 40_000_000, 80_000_000, {"ffn": 7_000_000}
)


def png(width: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 3), "white").save(file, "PNG")
    return file.getvalue()


FULL = Report(
    title="A title",
    summary="A summary.",
    facts={"parameters": "3.9M"},
    bits={"this model": 1.5, "5-gram": 2.0, "xz -9": 3.0},
    bits_note="A note on bits.",
    loss=png(),
    samples=[Sample("step 10", "def ", "f(x):\n    return x")],
    tokenizer={"bytes per token": "3.42"},
    lines=[["import", " os", "\n"]],
    attention=Attention(
        ["a", " b", "\n", "d", "e"], {"decoder.blocks.0.attn": WEIGHTS, "decoder.blocks.1.attn": WEIGHTS[:2]}
    ),
    profile=PROFILE,
    machine="one core",
    caches={"70B, 64": 343_597_383_680, "70B, 8": 42_949_672_960},
    caches_note="A note on caches.",
    tree="Model\n└─ decoder",
    command="sublayer quickstart --seed 0",
    versions={"torch": "2.13"},
)


class Page(HTMLParser):
    """What a browser would make of it, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "image", "rect"):
            self._open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "tags close in the order in which they opened"

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.inside[tag][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    (path, *_) = write_report(tmp_path / "new" / "report.html", FULL)
    page = Page(path.read_text(encoding="utf-8"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "a", "video", "audio", "source")
        for name, value in attributes.items():
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                assert (value or "").startswith("data:image/png;base64,"), (tag, name)
    style = page.inside["style"][0]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert {meta.get("name") for meta in page.of("meta")} >= {"viewport", "color-scheme"}


def test_everything_given_is_on_the_page() -> None:
    text = re.sub(r"\s+", " ", "".join(Page(render(FULL)).inside["body"]))
    for shown in (
        "A title", "A summary.", "3.9M", "1.500", "2.000", "3.000", "A note on bits.", "step 10", "def f(x): return x",
        "import os⏎", "3.42", "layer 1", "50.0%", "30.0%", "20.0%", "900 ms for 1,800 tokens, which is 2,000 a second",
        "one core", "167.0 MB", "40.0 MB", "80.0 MB", "7.0 MB", "took 1,000 ms", "343.6 GB", "42.9 GB",
        "A note on caches.", "└─ decoder", "sublayer quickstart --seed 0", "2.13",
    ):  # fmt: skip
        assert shown in text, shown


def test_what_is_not_given_leaves_no_trace(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "report.html", Report("A title", "A summary."))
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert len(paths) == 1
    assert page.inside["h1"] == ["A title"]
    assert "h2" not in page.inside
    assert "script" not in page.inside


def test_texts_are_shown_and_never_run() -> None:
    facts = {EVIL: EVIL}
    evil = Report(
        EVIL, EVIL, facts, {"ours": 1.0, EVIL: 2.0}, EVIL, png(), [Sample(EVIL, EVIL, EVIL)], facts, [[EVIL]],
        Attention([EVIL] * 5, {f"decoder.blocks.0.{EVIL}": WEIGHTS}), replace(PROFILE, seconds={EVIL: 1.0}), EVIL,
        {EVIL: 1}, EVIL, EVIL, EVIL, facts,
    )  # fmt: skip
    page, plain = Page(render(evil)), Page(render(FULL))
    assert len(page.of("script")) == len(plain.of("script")) == 2
    assert page.inside["script"][1] == plain.inside["script"][1]
    assert all((image["src"] or "").startswith("data:") for image in page.of("img"))
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.inside["h1"] == page.inside["title"] == [EVIL]
    assert page.inside["pre"][0] == EVIL + EVIL
    assert json.loads(page.inside["script"][0])["titles"][0].endswith(f"{EVIL.replace('.', ' ')}, head 0")


def test_texts_that_no_font_or_formula_can_draw_are_drawn_all_the_same(tmp_path: Path, recwarn) -> None:
    strange = ["$x^{$", "\ud83d", "\x1b[31m", "日本", "🎉"]
    report = replace(FULL, attention=Attention(strange, {"decoder.blocks.0.$\\bad$": WEIGHTS}), title="\udc80")
    report = replace(report, bits={"$\\bad$": 1.0})
    paths = write_report(tmp_path / "report.html", report)
    assert [path.read_bytes()[1:4] for path in paths[1:]] == [b"PNG"] * 3
    assert [str(warning.message) for warning in recwarn.list] == []


def test_pictures_lie_beside_the_page_and_in_it(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "report.html", FULL)
    assert [path.name for path in paths] == ["report.html", "bits.png", "loss.png", "attention.png"]
    assert (tmp_path / "loss.png").read_bytes() == FULL.loss
    assert f"base64,{base64.b64encode(FULL.loss or b'').decode()}" in paths[0].read_text(encoding="utf-8")
    for path in paths[1:]:
        Image.open(path).load()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)


def test_bars_are_as_long_as_their_values_and_the_model_stands_out() -> None:
    html = render(replace(FULL, profile=None, caches={}))
    assert re.findall(r"<b style=\"width:([\d.]+)%", html) == ["50.00", "66.67", "100.00"]
    assert [bar["class"] for bar in Page(html).of("div") if "bar" in (bar.get("class") or "").split()] == [
        "bar ours", "bar", "bar",
    ]  # fmt: skip


def test_every_head_has_its_picture_and_its_weights() -> None:
    page = Page(render(FULL))
    data = json.loads(page.inside["script"][0])
    assert data["titles"] == [
        f"layer {layer}, head {head}" for layer, heads in ((0, 3), (1, 2)) for head in range(heads)
    ]
    expected = [*WEIGHTS, *WEIGHTS[:2]]
    pictures = [image for image in page.of("img") if "head" in (image["alt"] or "")]
    assert [picture["alt"] for picture in pictures] == data["titles"]
    for picture, encoded, weights in zip(pictures, data["weights"], expected, strict=True):
        bytes_ = np.frombuffer(base64.b64decode(encoded), np.uint8).reshape(5, 5)
        np.testing.assert_allclose(bytes_ / 255, weights.numpy(), atol=0.5 / 255 + 1e-6)
        image = Image.open(io.BytesIO(base64.b64decode((picture["src"] or "").split(",")[1]))).convert("RGBA")
        alpha = np.asarray(image)[..., 3]
        np.testing.assert_allclose((alpha / 255) ** 2, bytes_ / 255, atol=0.01)


def test_the_head_shown_large_is_the_one_that_looks_most_sharply_back() -> None:
    """Not one that looks at itself or at the first token, as heads with nothing to do are known to."""
    itself, first, before = torch.eye(6), torch.zeros(6, 6), torch.zeros(6, 6)
    first[:, 0] = 1
    before[0, 0] = 1
    before[1:, :-1] += torch.eye(5)
    flat = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    layers = {
        "decoder.blocks.0.attn": torch.stack([itself, first]),
        "decoder.blocks.1.attn": torch.stack([flat, before]),
    }
    report = replace(FULL, attention=Attention(list("abcdef"), layers))
    page = Page(render(report))
    assert json.loads(page.inside["script"][0])["chosen"] == 3
    pressed = [button.get("aria-pressed") for button in page.of("button") if button.get("class") == "head"]
    assert pressed == ["false", "false", "false", "true"]
    large = next(image["href"] for image in page.of("image"))
    assert large == next(image["src"] for image in page.of("img") if image["alt"] == "layer 1, head 1")
    assert "layer 1, head 1" in page.inside["h3"]


def test_the_page_of_a_model_of_12_layers_and_12_heads_stays_below_3_mb(tmp_path: Path) -> None:
    weights = torch.softmax(torch.randn(12, 64, 64).masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf), -1)
    attention = Attention([f"tok{i}" for i in range(64)], {f"decoder.blocks.{i}.attn": weights for i in range(12)})
    (path, *_) = write_report(tmp_path / "report.html", replace(FULL, attention=attention))
    assert path.stat().st_size < 3_000_000


def test_attention_of_other_tokens_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    report = replace(FULL, attention=Attention(["a", "b"], {"decoder.blocks.0.attn": WEIGHTS}))
    with pytest.raises(
        InputError, match=r"decoder.blocks.0.attn: attention over 2 tokens is \[N, 2, 2\], got \[3, 5, 5\]"
    ):
        write_report(tmp_path / "report.html", report)
    assert not list(tmp_path.iterdir())


def test_texts_of_tokens() -> None:
    tokenizer = Bytes(("<|end|>",))
    assert token_texts(tokenizer, [256, *"aé\n".encode()]) == ["⟨256⟩", "a", "\\xc3", "\\xa9", "\n"]
    assert visible("a b\n\t\x07é") == "a b⏎⇥\\x07é"
    assert label("\n    x") == "⏎····x"
    assert label("def" + " " * 20) == "def········…"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (343_597_383_680, "343.6 GB"), (2.5e12, "2.5 TB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown
