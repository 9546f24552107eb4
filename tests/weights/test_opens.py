"""Every model that a class of Hugging Face's expresses, exported, opens in it, found by its config.json alone, and
answers the same. The other way, from their models to ours and back, is each recipe's own test."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.head import of_documents
from sublayer.recipes import family, to_hf
from sublayer.step import Step
from tests.case import Case, Document, alone, rough
from tests.cases import CASES
from tests.oracle import TOLERANCE, raised, reopened

OPENED = [name for name, case in CASES.items() if case.hf and name != "dit"]  # diffusers' is in test_dit.py
ROUNDED = {"transformer": 1e-7}  # of the largest: they make its sinusoids in fp32


@pytest.mark.parametrize("name", OPENED)
def test_an_export_opens_in_the_class_that_its_config_names(name: str, tmp_path: Path) -> None:
    check(CASES[name], name, tmp_path)


def check(case: Case, name: str, folder: Path) -> None:
    model = rough(case)
    sublayer.save(model, folder, layout="hf")
    (document,) = case.documents(case, [9], 18)
    with torch.no_grad():
        wanted = alone(model, document)
        found = theirs(folder, document)
    wanted = of_documents(wanted[None], Step())[0] if found.dim() == 1 else wanted
    assert_close(found, wanted, rtol=0, atol=ROUNDED.get(name, TOLERANCE) * float(wanted.abs().max()))


HEADLESS = [name for name in OPENED if "," not in name and CASES[name].spec.decoder is not None]
HEADLESS.remove("transformer")  # whose base class wants its sinusoids stored, which it makes all the same


@pytest.mark.parametrize("name", HEADLESS)
def test_so_does_a_model_without_a_head_in_the_base_class(name: str, tmp_path: Path) -> None:
    """As it is read from the folder of one: its vectors are the same."""
    case = CASES[name]
    check(replace(case, spec=case.spec.replace(head=None, tied=False)), name, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")


def test_so_does_t5s_encoder_alone(tmp_path: Path) -> None:
    case = CASES["t5"]
    alone = case.spec.replace(decoder=None, shared=False, head=None, tied=False)
    check(replace(case, spec=alone, documents=CASES["bert"].documents), "t5", tmp_path)


def theirs(folder: Path, document: Document) -> Tensor:
    """What the class of a folder answers, for a document alone."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    opened = AutoConfig.from_pretrained(folder)
    made = getattr(transformers, name)
    assert type(opened) is made.config_class, "AutoConfig takes it for another's"
    with raised():
        found: Any = reopened(folder, made)(**asked(document))
    return (found.logits if "logits" in found else found.last_hidden_state)[0]


def asked(document: Document) -> dict[str, Any]:
    inputs = document.inputs[None]
    if document.source is not None:
        name = "input_features" if document.source.is_floating_point() else "input_ids"
        source = document.source.T if name == "input_features" else document.source
        return {name: source[None].double() if name == "input_features" else source[None], "decoder_input_ids": inputs}
    return {"pixel_values": inputs.double()} if inputs.is_floating_point() else {"input_ids": inputs}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mamba", {"inner": 24}, "decoder.blocks.0.mixer.op.inner=24: no multiple of the width, dim=32"),
        ("mamba2", {"head_size": 6}, "decoder.blocks.0.mixer.op.head_size=6 in 4 heads: no multiple"),
        ("jamba", {"inner": 24}, "decoder.blocks.0.mamba.op.inner=24: no multiple"),
        ("bamba", {"mamba_head_size": 6}, "decoder.blocks.0.mamba.op.head_size=6 in 4 heads: no multiple"),
    ],
)
def test_an_inner_width_that_is_no_multiple_is_refused(name: str, changes: dict[str, int], said: str) -> None:
    """Their classes take whole expansions alone."""
    module = family(name)
    with pytest.raises(SpecError, match=re.escape(said)):
        to_hf(getattr(module, name)(**module.TINY | changes))
