"""The survey of local models: facts, whether a model runs, which drafter fits, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.catalog import survey as surveys
from forerun.catalog.survey import Survey, survey
from forerun.models.local import LocalModel, list_local_models, local_model_names
from tests.catalog import hub
from tests.models.homes import HOST, ollama_model
from tests.tiny_gguf import tiny_gguf

LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 512,
}  # fmt: skip


def safetensors(
    directory: Path, rows: int = 8, dtype: str = "BF16", tensor: str = "w", **config: object
) -> Path:
    """A directory of a Hugging Face model with one matrix [rows, 8], called `tensor`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(hub.safetensors({tensor: (rows, 8)}, dtype))
    return directory


def survey_one(path: Path, name: str = "m") -> Survey:
    (row,) = survey([LocalModel(name, path, "directory")])
    return row


def test_incomplete_models_are_listed_but_not_offered(home: Path) -> None:
    ollama_model(home, f"{HOST}/library/cloud/latest", layer="system")
    tiny_gguf(home / "mine/m-00002-of-00002.gguf")  # a later shard alone is not a model
    tiny_gguf(home / "mine/n-00001-of-00002.gguf")
    found, _ = list_local_models([home / "mine"])
    rows = survey(found)
    assert [(Path(row.name).name, row.runs) for row in rows] == [
        ("n-00001-of-00002.gguf", False), ("ollama:cloud", False)
    ]  # fmt: skip
    assert "n-00002-of-00002.gguf is not beside it" in rows[0].reason and "cloud" in rows[1].reason
    assert local_model_names() == []


def test_facts_of_a_gguf_file(home: Path) -> None:
    """If most bytes have another type than the label of the file, the format names that type."""
    tensors = {"token_embd.weight": ("Q8_0", (6, 256)), "blk.0.ffn_up.weight": ("Q4_K", (2, 256))}
    row = survey_one(tiny_gguf(home / "m.gguf", tensors, general__file_type=15))
    assert (row.format, row.family) == ("Q4_K_M, 85% Q8_0", "llama")
    assert (row.parameters, row.context) == (2048, 2048)
    assert row.runs and row.bytes == (home / "m.gguf").stat().st_size and row.draft == "suffix"
    assert survey_one(tiny_gguf(home / "m.gguf", tensors, general__file_type=7)).format == "Q8_0"
    assert survey_one(tiny_gguf(home / "m.gguf", tensors, general__file_type=None)).format == "Q8_0"
    labelled = tiny_gguf(home / "m.gguf", {"a": ("Q4_K", (1, 256))}, general__file_type=15)
    assert survey_one(labelled).format == "Q4_K_M"


def test_shards_count_together(home: Path) -> None:
    first = tiny_gguf(home / "m-00001-of-00002.gguf", {"a": ("F32", (2, 8))})
    second = tiny_gguf(
        home / "m-00002-of-00002.gguf", {"b": ("F32", (3, 8))}, general__architecture=None
    )
    row = survey_one(first)
    assert row.parameters == 40 and row.bytes == first.stat().st_size + second.stat().st_size


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general__architecture": "mamba"}, "family mamba is not supported"),
        ({"general__architecture": None}, "family without a name"),
        ({"general__type": "adapter"}, "is an adapter (LoRA), not a model"),
        ({"general__architecture": "clip"}, "an image projector"),
        ({"llama__attention__kv_lora_rank": 8}, "latent attention"),
        ({"general__architecture": "qwen2", "qwen2__expert_count": 8}, "a mixture of experts"),
        ({"tokenizer__ggml__pre": "new-one"}, "the pre-tokenizer 'new-one' is not known"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer 't5'"),
        ({"tensors": {}}, "a vocabulary but no weights"),
    ],
)
def test_reasons_that_a_gguf_file_cannot_run(
    home: Path, metadata: dict[str, object], reason: str
) -> None:
    row = survey_one(tiny_gguf(home / "m.gguf", **metadata))  # type: ignore[arg-type]
    assert not row.runs and reason in row.reason and not row.draft


def test_broken_files_are_listed_with_a_reason(home: Path) -> None:
    """Files that are truncated at any length, and other content with the ending .gguf."""
    path = tiny_gguf(home / "m.gguf")
    data = path.read_bytes()
    for length in range(0, len(data) - 32, 7):  # the last tensor is padded to 32 bytes
        path.write_bytes(data[:length])
        row = survey_one(path)
        assert not row.runs and row.reason and str(path) not in row.reason, length
    for data in (
        b"version https://git-lfs.github.com/spec/v1\n" * 2,
        b"<html>" * 9,
        bytes(99),
        b"GGUF" + b"\xff" * 99,
    ):
        path.write_bytes(data)
        assert not survey_one(path).runs
    directory = safetensors(home / "plain")
    (directory / "model.safetensors").write_bytes(b"\xff" * 20)
    assert "not a complete safetensors file" in survey_one(directory).reason
    (directory / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "other.safetensors"}}'
    )
    assert "other.safetensors" in survey_one(directory).reason
    (directory / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "weight_map" in survey_one(directory).reason
    (directory / "config.json").write_text("[]")
    assert "does not hold a JSON object" in survey_one(directory).reason


def test_facts_of_a_directory(home: Path) -> None:
    row = survey_one(safetensors(home / "plain"))
    assert (row.format, row.family) == ("safetensors bfloat16", "llama")
    assert (row.parameters, row.context) == (64, 512)
    assert row.runs
    four = {"quant_method": "gptq", "bits": 4}
    quantised = survey_one(safetensors(home / "gptq", dtype="I32", quantization_config=four))
    assert quantised.format == "safetensors gptq 4 bits" and quantised.parameters is None
    mlx = safetensors(home / "mlx", quantization={"group_size": 64, "bits": 4})
    assert "MLX" in survey_one(mlx).reason
    nested = dict(model_type="mistral3", text_config=LLAMA)
    row = survey_one(safetensors(home / "multimodal", **nested))
    assert row.runs and (row.family, row.context) == ("llama", 512)
    mixture = dict(num_local_experts=8, num_experts_per_tok=2, model_type="mixtral")
    assert survey_one(safetensors(home / "mixtral", **mixture)).runs
    assert "family bert is not" in survey_one(safetensors(home / "bert", model_type="bert")).reason
    head = safetensors(home / "head", speculators_model_type="eagle3")
    assert "a drafter for one" in survey_one(head).reason
    lacks = safetensors(home / "lacks", hidden_size=None)
    assert "the llama configuration lacks" in survey_one(lacks).reason


def test_a_model_that_exceeds_the_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "free_ram", lambda: 100)
    row = survey_one(tiny_gguf(home / "m.gguf"))
    assert not row.runs and "of memory" in row.reason


def test_the_suggested_draft_model_has_the_same_tokens_and_is_much_smaller(home: Path) -> None:
    """It is the smallest such model of the same file format, but never the model itself.

    Padding tokens of the embedding differ between the sizes of a family and do not count.
    """

    def model(name: str, rows: int, tokens: list[str], **metadata: object) -> LocalModel:
        tensors = {"a": ("F32", (rows, 8))}
        path = tiny_gguf(home / f"{name}.gguf", tensors, tokenizer__ggml__tokens=tokens, **metadata)  # type: ignore[arg-type]
        return LocalModel(name, path, "directory")

    models = [
        model("large", 100, ["a", "b", "[PAD1]", "[PAD2]"]),
        model("half", 51, ["a", "b"]),
        model("small", 20, ["a", "b", "[PAD1]"]),
        model("smallest", 10, ["a", "b"]),
        model("other", 5, ["a", "c"]),
        model("split", 5, ["ab", ""]),
        model("kind", 5, ["a", "b"], tokenizer__ggml__model="llama"),
        model("broken", 5, ["a", "b"], general__architecture="mamba"),
        LocalModel("plain", safetensors(home / "plain", rows=2), "directory"),
        LocalModel("twin", safetensors(home / "twin", rows=90), "directory"),
    ]
    assert {row.name: row.drafter for row in survey(models) if row.drafter} == {
        "large": "model:smallest", "half": "model:smallest", "small": "model:smallest", "twin": "model:plain",
    }  # fmt: skip


DRAFTERS = {  # fields of config.json, and the name of a tensor
    "EAGLE-1": ({"num_hidden_layers": 1}, "fc.weight"),
    "EAGLE-3": ({"num_hidden_layers": 1, "draft_vocab_size": 4}, "midlayer.mlp.up_proj.weight"),
    "P-EAGLE": ({"num_hidden_layers": 1, "pard_token": 3}, "model.fc.weight"),
    "EAGLE in vLLM's wrapper": ({"model_type": "eagle", "model": {}}, "fc.weight"),
    "MLP": ({"model_type": "mlp_speculator", "n_predict": 3}, "speculator.emb.0.weight"),
    "Medusa": ({"model_type": "medusa", "num_heads": 3}, "blocks.0.layers.0.weight"),
    "Medusa's authors": ({"medusa_num_heads": 3}, "0.0.linear.weight"),
    "speculators": ({"speculators_model_type": "eagle3"}, "layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_is_not_listed_as_a_runnable_model(kind: str, home: Path) -> None:
    """The configuration of some drafters is that of a Llama, which would fail only at loading."""
    fields, tensor = DRAFTERS[kind]
    row = survey_one(safetensors(home / "mine/drafter", tensor=tensor, **fields))
    assert not row.runs
    assert not row.draft
    assert row.reason == "is no model but a drafter for one, which --draft takes"


def test_an_unsupported_drafter_is_not_listed_as_a_runnable_model(home: Path) -> None:
    row = survey_one(safetensors(home / "mine/drafter", hydra_num_heads=4))
    reason = "is no model but a drafter for one, and forerun does not read this kind of drafter"
    assert not row.runs and row.reason == reason
