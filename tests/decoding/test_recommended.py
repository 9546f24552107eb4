"""What a checkpoint says of sampling."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from sublayer.decoding.recommended import recommended
from sublayer.errors import InputError


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "max_length": 20, "_from_model_config": True}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}, None),
        ({"repetition_penalty": 1.1, "max_new_tokens": 99}, {"repetition_penalty": 1.1, "max_tokens": 99}),
        ({"do_sample": False, "top_p": 0.5}, {"temperature": 0.0}),
        ({"do_sample": True, "top_k": 0}, {"top_k": None}),
        ({"temperature": None, "top_k": -1}, {"top_k": None}),
    ],
)
def test_generation_config(said: dict[str, Any], options: dict[str, Any] | None, tmp_path: Path) -> None:
    assert recommended(tmp_path) == ({}, "generation_config.json")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert recommended(tmp_path)[0] == (said if options is None else options)


@pytest.mark.parametrize("value", [-1, "hot", True])
def test_a_wrong_value_names_the_file(value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(InputError, match="generation_config.json: Sampling.*temperature"):
        recommended(tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert recommended(tmp_path / "a.gguf") == ({"temperature": 0.5, "top_k": 40}, "a.gguf")
