"""The Python examples of the documentation run as they stand."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sublayer

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    if "```python" in page.read_text(encoding="utf-8")
)  # fmt: skip


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def examples() -> dict[str, Any]:
    """What the pages take as given."""
    q, k, v = torch.randn(2, 8, 16, 64), torch.randn(2, 4, 16, 64), torch.randn(2, 4, 16, 64)
    segment = torch.tensor([[1] * 10 + [2] * 6, [1] * 12 + [0] * 4])
    return {"ids": torch.randint(0, 257, (2, 8)), "q": q, "k": k, "v": v, "segment": segment}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in a folder that holds a small model called "folder"."""
    monkeypatch.chdir(tmp_path)
    sublayer.save(sublayer.recipes.llama(32, 2, 4, 2, hidden=64, vocab=257).build(), "folder")
    sublayer.text.Bytes(("<|end|>",)).save("folder")
    names = examples()
    for block in blocks(page):
        if ">>>" not in block:
            exec(compile(block, page.name, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        assert runner.run(test, clear_globs=False).failed == 0
        names.update(test.globs)


def test_the_op_and_the_recipe_of_the_guide_decode_as_they_run_whole() -> None:
    names = examples()
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    ids = torch.randint(0, 257, (2, 9))
    state = sublayer.State.allocate(model, 2, 9)
    parts = [model(chunk, state=state) for chunk in ids.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=0, atol=1e-5)
