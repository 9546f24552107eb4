"""A published Mamba that classifies bytes, against onnxruntime."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sublayer

TEXTS = {
    "python": b"import os\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n",
    "html": b'<div class="page"><h1>Residual streams</h1><p>What each layer adds.</p></div>\n',
    "sql": b"SELECT name, count(*) FROM layers WHERE width > 256 GROUP BY name ORDER BY name;\n",
}
"""One text after another: what a byte is called depends on both sides of it."""


@pytest.mark.assets
@torch.no_grad()
def test_a_classifier_that_scans_both_ways_answers_as_onnxruntime_does(tmp_path: Path) -> None:
    from tests.assets import byte_mamba

    model = sublayer.load(byte_mamba.convert(tmp_path))
    assert model.spec.parameters() == 1_364_035
    ids = torch.tensor(list(b"".join(TEXTS.values())))
    session = import_module("onnxruntime").InferenceSession(byte_mamba.data() / "mamba_al.onnx")
    expected = torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0])
    found = model(ids[None])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    labels = json.loads((byte_mamba.data() / "manifest.json").read_text())["labels"]
    parts = found.argmax(-1).split([len(text) for text in TEXTS.values()])
    assert [labels[int(part.mode().values)] for part in parts] == list(TEXTS)
