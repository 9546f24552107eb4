"""The Python examples of the documentation run as they stand."""

import re
from pathlib import Path

import pytest
import torch

import sublayer

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    if "```python" in page.read_text(encoding="utf-8")
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in a folder that holds a small model called "folder"."""
    monkeypatch.chdir(tmp_path)
    sublayer.save(sublayer.recipes.llama(32, 2, 4, 2, hidden=64, vocab=257).build(), "folder")
    names: dict[str, object] = {"ids": torch.randint(0, 257, (2, 8))}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)


def test_the_op_and_the_recipe_of_the_guide_decode_as_they_run_whole() -> None:
    names: dict[str, object] = {}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    ids = torch.randint(0, 257, (2, 9))
    state = sublayer.State.allocate(model, 2, 9)
    parts = [model(chunk, state=state) for chunk in ids.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=0, atol=1e-5)
