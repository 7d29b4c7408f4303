"""Model directories: every layout that should load does, and whatever is wrong with one is a
LoadError in one line.

Protects: shards, tied and fused tensors, both GPT-2 layouts, buffers of older versions; the message
for each way in which a config.json or a checkpoint can be broken; and that no other exception
escapes, whatever config.json holds."""

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

from forerun.cache.attention import Segment
from forerun.errors import LoadError
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.weights import Weights
from forerun.runtime.torch_runner import Runner
from tests import tiny

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
CONTEXT = 32


def load(directory: Path) -> Decoder:
    return load_decoder(directory, torch.float32, CPU, CONTEXT)


def refused(directory: Path, *words: str) -> None:
    """Loading raises LoadError, in one line that holds all of `words`."""
    with pytest.raises(LoadError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400 + 2 * len(str(directory))
    for word in words:
        assert word in message


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """A directory of its own with a family's model."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(tiny.family(name), tmp_path / name))

    return make


def set_config(directory: Path, **changes: Any) -> Path:
    """Change config.json; `...` removes a key."""
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return directory


def set_tensors(directory: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Rewrite model.safetensors as `change` says."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v.contiguous() for k, v in (change(tensors) or tensors).items()}, path)
    return directory


def flat(weights: Weights) -> Iterator[Tensor]:
    """All tensors of a decoder, in a fixed order."""
    yield weights.embed
    yield weights.head.weight
    yield weights.norm.weight
    if weights.positions is not None:
        yield weights.positions
    for layer in weights.layers:
        for name in sorted(layer.__slots__):
            part = getattr(layer, name)
            if part is not None:
                yield part.weight
                if part.bias is not None:
                    yield part.bias


def same(one: Path, other: Path) -> None:
    first, second = list(flat(load(one).weights)), list(flat(load(other).weights))
    assert len(first) == len(second)
    assert all(map(torch.equal, first, second))


# ---------------------------------------------------------------- what loads


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3"])
def test_shards(name: str, tmp_path: Path) -> None:
    tiny.hf_model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    same(tmp_path, tiny.family(name))


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_tied_embeddings_with_and_without_a_head_in_the_file(
    name: str, copy: Callable[[str], Path]
) -> None:
    decoder = load(tiny.family(name))
    assert decoder.config.tied
    assert decoder.weights.head.weight is decoder.weights.embed
    stems = {"gpt2": "transformer.wte.weight"}
    stem = stems.get(name, "model.embed_tokens.weight")
    with_head = set_tensors(copy(name), lambda t: t | {"lm_head.weight": t[stem].clone()})
    assert "lm_head.weight" not in load_file(tiny.family(name) / "model.safetensors")
    same(with_head, tiny.family(name))


def test_gpt2_without_its_prefix_and_with_the_buffers_of_older_versions(
    copy: Callable[[str], Path],
) -> None:
    def older(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        buffers = {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4).tril() for i in range(3)}
        return bare | buffers | {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}

    assert all(
        name.startswith("transformer.")
        for name in load_file(tiny.family("gpt2") / "model.safetensors")
    )
    same(set_tensors(copy("gpt2"), older), tiny.family("gpt2"))


def test_weight_bytes_counts_a_tied_embedding_once() -> None:
    for name in ("qwen2", "llama"):
        decoder = load(tiny.family(name))
        w = decoder.weights
        layers = sum(m.weight.numel() for x in w.layers for m in (x.qkv, x.out, x.up, x.down))
        assert decoder.weight_bytes == 4 * (layers + tiny.VOCAB * decoder.config.hidden)


@pytest.mark.parametrize(
    "own, other, expected",
    [
        (2, ..., (2,)),
        ([2, 3], ..., (2, 3)),
        (None, ..., ()),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {}, (2,)),
    ],
)
def test_end_tokens(
    own: Any, other: Any, expected: tuple[int, ...], copy: Callable[[str], Path]
) -> None:
    """generation_config.json goes before config.json, where it names any."""
    directory = set_config(copy("llama"), eos_token_id=own)
    generation = directory / "generation_config.json"
    generation.unlink(missing_ok=True)
    if other is not ...:
        generation.write_text(json.dumps(other))
    assert load_config(directory).end_ids == expected


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'model_type': 'llama'}",
        b"\xff\xfe{}",
        b"[1, 2]",
        b'"llama"',
        b"null",
        b"7",
        b"\x00\x01",
    ],
    ids=repr,
)
def test_config_that_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    "name, near",
    [("lama", "llama"), ("gemma3-text", "gemma3_text"), ("qwen2_moe", "qwen2"), ("gpt_2", "gpt2")],
)
def test_unknown_family_names_the_nearest(
    name: str, near: str, copy: Callable[[str], Path]
) -> None:
    refused(set_config(copy("llama"), model_type=name), repr(name), repr(near))


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"]
SIZES += ["num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("key", SIZES)
def test_missing_key_is_named(key: str, copy: Callable[[str], Path]) -> None:
    refused(set_config(copy("llama"), **{key: ...}), "config.json", key)


def test_heads_that_cannot_be_shared(copy: Callable[[str], Path]) -> None:
    refused(
        set_config(copy("llama"), num_key_value_heads=3), "4 attention heads", "3 key-value heads"
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm3", "gemma2", "gemma3"])
@pytest.mark.parametrize("count", [1, 9])
def test_layer_types_of_the_wrong_length(
    name: str, count: int, copy: Callable[[str], Path]
) -> None:
    changes = dict(
        layer_types=["sliding_attention"] * count, sliding_window=7, use_sliding_window=True
    )
    refused(set_config(copy(name), **changes), "layer_types")


def test_unknown_activation_names_the_nearest(copy: Callable[[str], Path]) -> None:
    refused(set_config(copy("llama"), hidden_act="swosh"), "swosh", "swish")


def test_unknown_rope(copy: Callable[[str], Path]) -> None:
    refused(
        set_config(copy("llama"), rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "spiral",
        "yarn",
    )


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3", "longrope"])
def test_scaled_rope_without_its_parameters(kind: str, copy: Callable[[str], Path]) -> None:
    name = "phi3" if kind == "longrope" else "llama"
    directory = set_config(copy(name), rope_parameters={"rope_type": kind, "rope_theta": 1e4})
    refused(directory, kind)


@pytest.mark.parametrize("content", ["{", "[]", "null", "3", '"x"'])
def test_broken_generation_config(content: str, copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    (directory / "generation_config.json").write_text(content)
    refused(directory, "generation_config.json")


WRONG: list[Any] = [None, "x", "7", -1, 0, 1.5, True, [], [1], {}, {"a": 1}]
READ = {  # what each family reads of config.json, beside COMMON
    "llama": "attention_bias mlp_bias",
    "mistral": "sliding_window",
    "qwen2": "sliding_window use_sliding_window max_window_layers layer_types",
    "smollm3": "no_rope_layers no_rope_layer_interval layer_types",
    "phi3": "sliding_window original_max_position_embeddings",
    "gemma2": "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping hidden_activation sliding_window"
    " layer_types",
    "gemma3": "sliding_window_pattern layer_types rope_local_base_freq query_pre_attn_scalar",
    "gpt2": "n_embd n_head n_layer n_inner n_positions layer_norm_epsilon activation_function scale_attn_weights",
}
COMMON = (
    "num_key_value_heads head_dim rms_norm_eps rope_parameters rope_theta rope_scaling hidden_act tie_word_embeddings"
    " eos_token_id"
)


def leak(directory: Path, run: bool) -> str | None:
    """What escapes from loading (and one pass) other than LoadError."""
    try:
        decoder = load(directory)
        if run:
            runner = Runner(decoder, tokens=32, page=8, slots=1)
            runner.cache.pages.grow(0, 3)
            runner.forward([Segment(0, [1, 2, 3], [-1, 0, 1], [2])])
    except LoadError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", READ)
def test_no_other_exception_escapes_whatever_config_holds(
    name: str, copy: Callable[[str], Path]
) -> None:
    """One key at a time of the wrong type or out of range; a model that does load must also run."""
    directory, keys = (
        copy(name),
        READ[name].split() + ([] if name == "gpt2" else [*COMMON.split(), *SIZES]),
    )
    original, leaks = (directory / "config.json").read_text(), []
    for key in keys:
        for value in WRONG:
            set_config(directory, **{key: value})
            found = leak(directory, run=True)
            leaks += [f"{key}={value!r}: {found}"] if found else []
            (directory / "config.json").write_text(original)
    assert not leaks, "\n".join(leaks)


@pytest.mark.parametrize(
    "name, rope",
    [
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": "4"}),
        ("llama", {"rope_type": "default", "rope_theta": "x"}),
        ("llama", {"rope_type": "default", "rope_theta": None}),
        ("llama", {"rope_type": None, "rope_theta": 1e4}),
        ("llama", {"rope_type": ["yarn"], "rope_theta": 1e4}),
        (
            "llama",
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": "x",
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "llama",
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 0,
            },
        ),
        ("llama", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 9.0}),
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": -1}),
        ("llama", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": "x"}),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0],
                "long_factor": [1.0],
            },
        ),
        (
            "phi3",
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": "a", "long_factor": None},
        ),
        ("gemma3", {"full_attention": 3, "sliding_attention": 4}),
        ("gemma3", {"full_attention": {"rope_type": "spiral"}, "sliding_attention": {}}),
    ],
    ids=repr,
)
def test_no_other_exception_escapes_whatever_the_rope_is(
    name: str, rope: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    assert leak(set_config(copy(name), rope_parameters=rope), run=True) is None


# ---------------------------------------------------------------- tensors

ATTENTION = "model.layers.1.self_attn."


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("llama", f"{ATTENTION}k_proj.weight"),
        ("qwen2", f"{ATTENTION}v_proj.bias"),
        ("qwen3", f"{ATTENTION}q_norm.weight"),
        ("phi3", f"{ATTENTION}qkv_proj.weight"),
        ("gemma2", "model.layers.0.post_feedforward_layernorm.weight"),
        ("gpt2", "transformer.wpe.weight"),
        ("gpt2", "transformer.h.0.mlp.c_fc.bias"),
    ],
)
def test_missing_tensor_is_named(name: str, tensor: str, copy: Callable[[str], Path]) -> None:
    refused(
        set_tensors(copy(name), lambda t: {k: v for k, v in t.items() if k != tensor}),
        tensor,
        "lacks",
    )


@pytest.mark.parametrize(
    "name, tensor, shape",
    [
        ("llama", "model.embed_tokens.weight", (64, 31)),
        ("llama", "model.embed_tokens.weight", (63, 32)),
        ("llama", "model.norm.weight", (33,)),
        ("llama", "model.norm.weight", (32, 1)),
        ("llama", "model.norm.weight", ()),
        ("llama", f"{ATTENTION}q_proj.weight", (32,)),
        ("llama", f"{ATTENTION}q_proj.weight", (32, 32, 1)),
        ("qwen3", f"{ATTENTION}k_norm.weight", (8,)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (96, 32)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (96,)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (32, 96, 1)),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", ()),
    ],
    ids=str,
)
def test_misshapen_tensor_is_named(
    name: str, tensor: str, shape: tuple[int, ...], copy: Callable[[str], Path]
) -> None:
    refused(
        set_tensors(copy(name), lambda t: t | {tensor: torch.zeros(shape)}), tensor, "config.json"
    )


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{ATTENTION}q_proj.weight": (24, 32), f"{ATTENTION}k_proj.weight": (24, 32)},
        {
            "model.layers.0.mlp.gate_proj.weight": (40, 32),
            "model.layers.0.mlp.up_proj.weight": (56, 32),
        },
    ],
    ids=["qkv", "gate-up"],
)
def test_misshapen_parts_that_sum_to_the_right_shape(
    tensors: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    """The parts of a stacked matrix must each have their own size."""
    refused(
        set_tensors(
            copy("llama"),
            lambda t: t | {name: torch.zeros(shape) for name, shape in tensors.items()},
        ),
        next(iter(tensors)),
    )


def test_leftover_tensors_are_named(copy: Callable[[str], Path]) -> None:
    extra = {f"vision.{i}.weight": torch.zeros(2) for i in range(6)}
    refused(
        set_tensors(copy("llama"), lambda t: t | extra), "6 tensors", "vision.0.weight", "2 more"
    )


def test_a_layer_too_many(copy: Callable[[str], Path]) -> None:
    refused(set_config(copy("llama"), num_hidden_layers=2), "model.layers.2.")


def test_biases_the_configuration_does_not_mention(copy: Callable[[str], Path]) -> None:
    refused(set_config(copy("llama-biased"), mlp_bias=False), "mlp.down_proj.bias")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool])
def test_quantised_tensor(dtype: torch.dtype, copy: Callable[[str], Path]) -> None:
    name = f"{ATTENTION}o_proj.weight"
    refused(
        set_tensors(copy("llama"), lambda t: t | {name: t[name].to(dtype)}),
        name,
        str(dtype),
        "quantised",
    )


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1], ids=str)
def test_truncated_weights(keep: float, copy: Callable[[str], Path]) -> None:
    path = copy("llama") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(path.parent, str(path.parent))


def test_pickled_weights_only(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "no *.safetensors", "convert", ".bin")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny.hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_absent_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    refused(sharded, gone.name, "download")


def test_shards_without_their_index(sharded: Path) -> None:
    """The files say what they hold; the index is needed only to know that one is absent."""
    (sharded / "model.safetensors.index.json").unlink()
    same(sharded, tiny.family("llama"))


INDEXES = [
    "",
    "{",
    "{}",
    "[]",
    "null",
    "7",
    '{"weight_map": null}',
    '{"weight_map": []}',
    '{"weight_map": {}}',
]
MAPS: list[Any] = [{"a": 5}, {"a": None, "b": "x"}, {"a": ["x"]}, {"a": {}}, {"a": ""}, {"a": "."}]


@pytest.mark.parametrize(
    "content", [*INDEXES, *(json.dumps({"weight_map": names}) for names in MAPS)]
)
def test_malformed_index(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, str(sharded))
