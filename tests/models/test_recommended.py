"""Recommended sampling parameters are read from model files; invalid ones are ignored."""

import json
from pathlib import Path

import gguf

from forerun.models.chat_template import recommended


def test_sampling_parameters_of_a_directory(tmp_path: Path) -> None:
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": 2,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert recommended(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_absent_and_invalid_parameters_are_ignored(tmp_path: Path) -> None:
    """Numbers of greedy configurations do not count; a broken file is reported by other readers of
    it."""
    assert recommended(tmp_path) == {}
    for text in ('{"temperature": 0.6}', '{"do_sample": false, "top_k": 5}', "[]", "{"):
        (tmp_path / "generation_config.json").write_text(text)
        assert recommended(tmp_path) == {}
    settings = {
        "do_sample": True,
        "temperature": "hot",
        "top_p": 3.0,
        "top_k": -7,
        "repetition_penalty": 1.1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert recommended(tmp_path) == {"repetition_penalty": 1.1}


def test_sampling_parameters_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_string("general.sampling.min_p", "none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert recommended(path) == {"temperature": 0.5, "top_k": 40}
