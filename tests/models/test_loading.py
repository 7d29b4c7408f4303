"""Loading of model directories: every supported layout, and errors in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.parameters import Weights
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.models import checks

Tensors = dict[str, Tensor]
Copy = Callable[[str], Path]
ATTENTION = "model.layers.1.self_attn."


def load(directory: Path) -> Decoder:
    return load_decoder(directory, torch.float32, torch.device("cpu"), 32)


def refused(directory: Path, *words: str) -> None:
    """Assert that loading raises LoadError in one line with all of `words`."""
    checks.refused(lambda: load(directory), directory, *words)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copy the model of a family."""
    return lambda name: Path(shutil.copytree(tiny.family(name), tmp_path / name))


def set_config(directory: Path, **changes: Any) -> Path:
    """Change config.json; `...` removes a key."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return directory


def set_tensors(directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Rewrite model.safetensors."""
    path = directory / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)
    return directory


def tensors_of(weights: Weights) -> Iterator[Tensor]:
    yield from (weights.embed, weights.head.weight, weights.norm.weight)
    if weights.positions is not None:
        yield weights.positions
    for layer in weights.layers:
        for name in sorted(layer.__slots__):
            part = getattr(layer, name)
            if part is not None and name != "scale":
                yield part.weight
                if part.bias is not None:
                    yield part.bias


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (list(tensors_of(load(path).weights)) for path in (one, other))
    assert len(first) == len(second) and all(map(torch.equal, first, second))


# ---------------------------------------------------------------- layouts that load


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_sharded_checkpoints(name: str, tmp_path: Path) -> None:
    """They load with the index and without it, from the headers of the files."""
    tiny.hf_model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_weights(tmp_path, tiny.family(name))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same_weights(tmp_path, tiny.family(name))


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_tied_embeddings(name: str, copy: Copy) -> None:
    """The file may have a head or not; the bytes of the head count once."""
    decoder = load(tiny.family(name))
    assert decoder.config.tied and decoder.weights.head.weight is decoder.weights.embed
    stem = {"gpt2": "transformer.wte.weight"}.get(name, "model.embed_tokens.weight")
    with_head = set_tensors(copy(name), lambda t: t | {"lm_head.weight": t[stem].clone()})
    assert_same_weights(with_head, tiny.family(name))
    layers = decoder.weights.layers
    size = sum(m.weight.numel() for x in layers for m in (x.qkv, x.out, x.up, x.down))
    assert decoder.weight_bytes == 4 * (size + tiny.VOCAB * decoder.config.hidden)


def test_checkpoints_with_older_names_load(copy: Copy) -> None:
    """Names lack their prefix, and buffers are stored that are not weights."""

    def with_old_names(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return bare | {
            "h.0.attn.bias": torch.ones(1, 1, 4, 4),
            "h.1.attn.masked_bias": torch.ones(1),
        }

    assert_same_weights(set_tensors(copy("gpt2"), with_old_names), tiny.family("gpt2"))


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (2, ..., (2,)),
        ([2, 3], ..., (2, 3)),
        (None, ..., ()),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {}, (2,)),
    ],
)
def test_end_tokens(config: Any, generation: Any, expected: tuple[int, ...], copy: Copy) -> None:
    """generation_config.json takes precedence over config.json."""
    directory = set_config(copy("llama"), eos_token_id=config)
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not ...:
        path.write_text(json.dumps(generation))
    assert load_config(directory).end_ids == expected


# ---------------------------------------------------------------- config.json

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
]
YARN = {"rope_type": "yarn", "rope_theta": 1e4}
CONFIGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"model_type": "lama"}, ("'lama'", "'llama'")),
    ("llama", {"model_type": "gemma3-text"}, ("'gemma3_text'",)),
    ("llama", {"model_type": "bert-large-cased"}, ("model_type", "known", "gpt2")),
    ("llama", {"model_type": ...}, ("model_type", "known")),
    ("llama", {"model_type": ["llama"]}, ("model_type", "known")),
    *(("llama", {key: ...}, ("config.json", key)) for key in SIZES),
    ("llama", {"num_key_value_heads": 3}, ("4 attention heads", "3 key-value heads")),
    ("llama", {"hidden_act": "swosh"}, ("swosh", "swish")),
    ("llama", {"rope_parameters": YARN | {"rope_type": "spiral"}}, ("spiral", "yarn")),
    *(
        ("llama", {"rope_parameters": YARN | {"rope_type": kind}}, (kind,))
        for kind in ("dynamic", "yarn", "llama3")
    ),
    ("phi3", {"rope_parameters": YARN | {"rope_type": "longrope"}}, ("longrope",)),
    ("smollm3", {"no_rope_layers": [1, 0]}, ("no_rope_layers",)),
    ("gemma2", {"layer_types": ["sliding_attention"] * 9}, ("layer_types",)),
    (
        "qwen3",
        {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 7},
        ("layer_types",),
    ),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
    ("qwen2", {"tie_word_embeddings": False}, ("lm_head.weight", "lacks")),
    ("llama", {"num_hidden_layers": 2}, ("model.layers.2.",)),
    ("llama-biased", {"mlp_bias": False}, ("mlp.down_proj.bias",)),
]


@pytest.mark.parametrize("name, changes, words", CONFIGS, ids=str)
def test_a_wrong_configuration_field_is_named(
    name: str, changes: dict[str, Any], words: tuple[str, ...], copy: Copy
) -> None:
    refused(set_config(copy(name), **changes), *words)


NO_OBJECTS = [b"", b"{", b"{'model_type': 'llama'}", b"\xff\xfe{}", b"[1, 2]", b"null", b"\x00\x01"]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", NO_OBJECTS, ids=repr)
def test_files_without_a_json_object_are_named(file: str, content: bytes, copy: Copy) -> None:
    directory = copy("llama")
    (directory / file).write_bytes(content)
    refused(directory, file)


WRONG_VALUES: list[Any] = [None, "x", "7", -1, 0, 1.5, True, [], [1], {}, {"a": 1}]
COMMON = (
    "num_key_value_heads head_dim rms_norm_eps rope_parameters rope_theta rope_scaling hidden_act "
    "tie_word_embeddings eos_token_id"
)
KEYS = {  # fields that each family reads
    "llama": f"attention_bias mlp_bias {COMMON} {' '.join(SIZES)}",
    "qwen2": "sliding_window use_sliding_window max_window_layers layer_types",
    "smollm3": "no_rope_layers no_rope_layer_interval layer_types",
    "phi3": "sliding_window original_max_position_embeddings",
    "gemma2": "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
    "hidden_activation sliding_window layer_types",
    "gemma3": "sliding_window_pattern layer_types rope_local_base_freq rope_parameters",
    "gpt2": "n_embd n_head n_layer n_inner n_positions layer_norm_epsilon activation_function "
    "scale_attn_weights",
}
ROPES: list[dict[str, Any]] = [
    YARN | {"rope_type": "linear", "factor": "4"},
    YARN | {"rope_type": "linear", "factor": 0},
    YARN | {"rope_type": "dynamic", "factor": "4"},
    {"rope_type": "default", "rope_theta": "x"},
    {"rope_type": None, "rope_theta": 1e4},
    {"rope_type": ["yarn"], "rope_theta": 1e4},
    YARN | {"factor": "x", "original_max_position_embeddings": 64},
    YARN | {"factor": 4.0, "original_max_position_embeddings": 0},
    YARN | {"rope_type": "llama3", "factor": 8.0},
    YARN | {"rope_type": "default", "partial_rotary_factor": 9.0},
    YARN | {"rope_type": "default", "partial_rotary_factor": "x"},
    YARN | {"rope_type": "longrope", "short_factor": [1.0], "long_factor": None},
    {"full_attention": 3, "sliding_attention": 4},
    {"full_attention": {"rope_type": "spiral"}, "sliding_attention": {}},
]


@pytest.mark.parametrize("name", KEYS)
def test_wrong_values_raise_only_load_errors(name: str, copy: Copy) -> None:
    """One field at a time has a wrong type or range; a model that still loads must also run."""
    directory = copy(name)
    original = (directory / "config.json").read_text()
    cases: list[dict[str, Any]] = [{k: v} for k in KEYS[name].split() for v in WRONG_VALUES]
    if "rope_parameters" in KEYS[name]:
        cases += [{"rope_parameters": rope} for rope in ROPES]
    for case in cases:
        set_config(directory, **case)
        try:
            runner = Runner(load(directory), tokens=32, page=8, slots=1)
            checks.read(runner, [1, 2, 3])
        except LoadError as error:
            assert "\n" not in str(error)
        except Exception as error:
            pytest.fail(f"{case}: {error!r}")
        (directory / "config.json").write_text(original)


# ---------------------------------------------------------------- tensors and files


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def shapes(**shapes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Replace tensors; `__` in their names is a dot."""
    zeros = {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
    return lambda tensors: tensors | zeros


Q = f"{ATTENTION}q_proj.weight"
CHECKPOINTS: dict[str, tuple[str, Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "no embedding": (
        "llama",
        without("model.embed_tokens.weight"),
        ("model.embed_tokens.weight", "lacks"),
    ),
    "no head": ("llama", without("lm_head.weight"), ("lm_head.weight", "lacks")),
    "no key": ("llama", without(f"{ATTENTION}k_proj.weight"), ("k_proj.weight", "lacks")),
    "no bias": ("qwen2", without(f"{ATTENTION}v_proj.bias"), ("v_proj.bias", "lacks")),
    "no norm": ("qwen3", without(f"{ATTENTION}q_norm.weight"), ("q_norm.weight", "lacks")),
    "no position": ("gpt2", without("transformer.wpe.weight"), ("wpe.weight", "lacks")),
    "few rows": ("llama", shapes(model__embed_tokens__weight=(63, 32)), ("embed_tokens", "config")),
    "an axis more": ("llama", lambda t: t | {Q: torch.zeros(32, 32, 1)}, (Q, "config.json")),
    "an axis less": ("llama", shapes(model__norm__weight=()), ("model.norm.weight", "config.json")),
    "not transposed": (
        "gpt2",
        shapes(transformer__h__0__attn__c_attn__weight=(96, 32)),
        ("c_attn.weight",),
    ),
    "parts that only add up": (
        "llama",
        lambda t: t | {Q: torch.zeros(24, 32), Q.replace("q_", "k_"): torch.zeros(24, 32)},
        (Q,),
    ),
    "left over": (
        "llama",
        lambda t: t | {f"vision.{i}.weight": torch.zeros(2) for i in range(6)},
        ("6 tensors", "vision.0.weight", "2 more"),
    ),
    "int8": ("llama", lambda t: t | {Q: t[Q].to(torch.int8)}, (Q, "torch.int8", "quantized")),
    "bool": ("llama", lambda t: t | {Q: t[Q].to(torch.bool)}, (Q, "torch.bool", "quantized")),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_wrong_tensor_is_named(case: str, copy: Copy) -> None:
    name, change, words = CHECKPOINTS[case]
    refused(set_tensors(copy(name), change), *words)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1], ids=str)
def test_truncated_weights_are_refused(keep: float, copy: Copy) -> None:
    path = copy("llama") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(path.parent, str(path.parent))


def test_pickled_weights_are_refused(copy: Copy) -> None:
    directory = copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "no *.safetensors", "convert", ".bin")


BAD_MAPS: list[Any] = [None, [], {}, {"a": 5}, {"a": None}, {"a": ["x"]}, {"a": ""}, {"a": "."}]
INDEXES = ["", "{", "{}", "[]", "null", *(json.dumps({"weight_map": names}) for names in BAD_MAPS)]


def test_a_wrong_index_is_refused(tmp_path: Path) -> None:
    tiny.hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    refused(tmp_path, missing.name, "download")
    for content in INDEXES:
        (tmp_path / "model.safetensors.index.json").write_text(content)
        refused(tmp_path, str(tmp_path))


def test_multi_token_layers_after_the_last_layer_are_ignored(copy: Copy) -> None:
    """Checkpoints of GLM-4.5 store them as further layers; config.json has their number."""
    directory, reason = copy("glm4_moe"), "fit no part of this model"
    layers = load_config(directory).layers
    extra = {f"model.layers.{layers}.eh_proj.weight": torch.zeros(4, 8)}
    set_tensors(directory, lambda stored: stored | extra)
    for number in (0, ..., None, "1", -1, True, 1.5):
        refused(set_config(directory, num_nextn_predict_layers=number), reason)
    load(set_config(directory, num_nextn_predict_layers=1))
    set_tensors(directory, lambda stored: stored | {f"model.layers.{layers + 1}.x": torch.zeros(1)})
    refused(directory, f"model.layers.{layers + 1}.x")
    load(set_config(directory, num_nextn_predict_layers=1 << 70))
