"""Tiny random-weight models, one a family, written by transformers as ordinary Hugging Face
directories.

`family(name)` is a family or a variant of one (`llama-yarn`), or a GGUF file with weights of a type
or a mix of types (`llama/q4_k_m`, see gguf_files.py); all share VOCAB. Weights are scaled up so
that next-token distributions are peaked and attention matters: a wrong mask or position then shows.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from forerun.draft.block.formats import BlockConfig, MarkovShape
from forerun.draft.block.module import BlockHead
from forerun.draft.eagle.formats import EagleConfig
from forerun.draft.eagle.module import Eagle1Head, Eagle3Head
from forerun.draft.eagle.mtp import MtpModule
from forerun.draft.head_config import MlpConfig
from forerun.draft.medusa import MedusaHeads, MlpSpeculator
from forerun.kernels import native
from forerun.models.config import load_config, make_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.native import NativeDecoder
from tests import families
from tests.families import VOCAB

M = TypeVar("M", bound=torch.nn.Module)

PAIR = dict(  # the shape of a model pair for benchmarks
    layers=3, draft_layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, context=256,
)  # fmt: skip
PADDED_VOCAB = 328  # of models with a tokenizer, which has fewer tokens, as in real models
SHORTLIST = tuple(i for i in range(VOCAB) if i % 4)  # token ids of a shortlist
LONG_CONTEXT = 8192  # context of `repetitive` models
_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_GEMMA = dict(_BASE, num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=12, sliding_window=7)
_LONG = dict(short_factor=[1.0, 1.1], long_factor=[2.0, 3.0])

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, _BASE),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, dict(_BASE, sliding_window=7)),
    "qwen2": (
        hf.Qwen2Config, hf.Qwen2ForCausalLM,
        dict(_BASE, tie_word_embeddings=True, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, dict(_BASE, head_dim=16)),
    "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM, dict(_BASE, num_hidden_layers=4, no_rope_layer_interval=4)),
    "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, dict(_BASE, sliding_window=9)),
    "gemma2": (
        hf.Gemma2Config, hf.Gemma2ForCausalLM,
        dict(_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    ),
    "gemma3": (
        hf.Gemma3TextConfig, hf.Gemma3ForCausalLM,
        dict(_GEMMA, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    ),
    "gpt2": (
        hf.GPT2Config, hf.GPT2LMHeadModel,
        dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    ),
}  # fmt: skip


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return a Llama configuration with a scaled rope."""
    return dict(_BASE, rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **parameters))


VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama-linear": (hf.LlamaConfig, hf.LlamaForCausalLM, rope("linear", factor=4.0)),
    "llama-dynamic": (hf.LlamaConfig, hf.LlamaForCausalLM, rope("dynamic", factor=2.0)),
    "llama-yarn": (
        hf.LlamaConfig, hf.LlamaForCausalLM, rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-llama3": (
        hf.LlamaConfig, hf.LlamaForCausalLM,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-biased": (hf.LlamaConfig, hf.LlamaForCausalLM, dict(_BASE, attention_bias=True, mlp_bias=True)),
    "phi3-longrope": (
        hf.Phi3Config, hf.Phi3ForCausalLM,
        dict(
            _BASE, original_max_position_embeddings=64,
            rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, **_LONG),
        ),
    ),
    "gemma3-scaled": (
        hf.Gemma3TextConfig, hf.Gemma3ForCausalLM,
        dict(
            _GEMMA, layer_types=["sliding_attention"] * 3 + ["full_attention"],
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
                "full_attention": dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            },
        ),
    ),
}  # fmt: skip


def hf_model(name: str, seed: int = 0, gain: float = 1.0, **overrides: Any) -> Any:
    """Return the transformers model of a family or variant, float32, with large random weights.

    A lower `gain` gives smaller weights, so that the order of summation matters less."""
    if name in families.MODELS:
        return families.make(name, gain, seed, **overrides)
    config_class, model_class, settings = (FAMILIES | VARIANTS)[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**(settings | overrides))).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(0.0, 0.6 * gain if value.ndim > 1 else 0.1)
            # norms scale by 1, Gemma's by 1 + w
            if value.ndim == 1 and key.endswith("weight") and "gemma" not in name:
                value.add_(1.0)
            if "embed" in key or "wte" in key or "wpe" in key:
                value.mul_(1.2)
    return model


_DIRECTORY = tempfile.TemporaryDirectory(prefix="forerun-tiny-")  # deleted at exit


def new_directory(name: str) -> Path:
    """Create a directory that is deleted when the test run ends."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_DIRECTORY.name))


@functools.cache
def family(name: str, seed: int = 0, gain: float = 1.0) -> Path:
    """Write the tiny model as a directory, or as a GGUF file, once per test run."""
    if "/" in name:
        return _gguf(name).path
    directory = new_directory(f"{name}-")
    hf_model(name, seed, gain).save_pretrained(directory)
    return directory


def _gguf(name: str) -> Any:
    from tests.gguf_files import written

    return written(*name.split("/"))


@functools.cache
def drafter(name: str, noise: float = 0.15) -> Path:
    """Write a model that often agrees with `family(name)`: the same weights plus noise."""
    directory = new_directory(f"{name.replace('/', '-')}-draft-")
    model = copy.deepcopy(_gguf(name).model).float() if "/" in name else hf_model(name)
    _add_noise(model, noise)
    model.save_pretrained(directory)
    return directory


def _add_noise(model: Any, noise: float) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.numel() > 1:  # a single number has no standard deviation
                value.add_(torch.randn_like(value) * noise * value.std().clamp(min=1e-3))


def medusa(name: str, heads: int = 3) -> MedusaHeads:
    """Return random Medusa heads for `family(name)`."""
    torch.manual_seed(4)
    config = load_config(family(name))
    module = MedusaHeads(heads, 1, config.hidden, config.vocab)
    module.begin(torch.randn(config.vocab, config.hidden))
    return module


@functools.cache
def assistant(name: str, ordered: bool = False) -> tuple[Any, Path]:
    """Return a random assistant for `family(name)`, a Gemma 4: transformers' module and its
    directory. If `ordered`, it scores only the tokens of its best centroids."""
    text = hf.AutoConfig.from_pretrained(family(name))
    layers = dict(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, head_dim=8,
        global_head_dim=16, sliding_window=8, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=0, attention_k_eq_v=text.attention_k_eq_v,
        num_global_key_value_heads=1 if text.attention_k_eq_v else None, num_kv_shared_layers=4,
    )  # fmt: skip
    config = hf.Gemma4AssistantConfig(
        text_config=hf.Gemma4TextConfig(**layers),
        backbone_hidden_size=text.hidden_size,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=5,
    )
    torch.manual_seed(3)
    model = hf.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0, 0.4 if value.ndim > 1 else 0.1)
            if value.ndim == 1:
                value.add_(1.0)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    directory = new_directory("assistant-") / "assistant"
    model.save_pretrained(directory)
    return model, directory


def mlp(name: str, **changes: Any) -> MlpSpeculator:
    """Return a random MLP speculator for `family(name)`."""
    torch.manual_seed(8)
    config = load_config(family(name))
    shape = dict(levels=3, hidden=config.hidden, inner=24, vocab=config.vocab)
    settings = shape | {"tied": True, "scaled": True} | changes
    return _randomised(MlpSpeculator(MlpConfig(**settings)))


def eagle_config(name: str, layer: dict[str, Any] | None = None, **changes: Any) -> EagleConfig:
    """Return the shape of a head for `family(name)` whose aux_hidden_layers are out of order;
    `layer` changes fields of its layer."""
    target = load_config(family(name))
    fields = dict(
        model_type="llama", hidden_size=target.hidden, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, vocab_size=target.vocab,
    )  # fmt: skip
    aux_hidden_layers = changes.pop("aux_hidden_layers", (2, 0, target.layers))
    settings = dict(target_hidden=target.hidden, draft_vocab=target.vocab) | changes
    own_layer = make_config(fields | (layer or {}), Path("config.json"))
    return EagleConfig(layer=own_layer, aux_hidden_layers=aux_hidden_layers, **settings)


def eagle(config: EagleConfig, seed: int = 6) -> Eagle3Head:
    """Return a random EAGLE-3 head of that shape."""
    torch.manual_seed(seed)
    return _randomised(Eagle3Head(config), config.layer.vocab, config.draft_vocab)


def parallel(name: str, layers: int = 2, **changes: Any) -> Eagle3Head:
    """Return an EAGLE-3 head for `family(name)` that drafts in parallel, with several layers and
    its own embedding."""
    layer = {"num_hidden_layers": layers} | changes.pop("layer", {})
    return eagle(eagle_config(name, layer, mask_token=3, **({"own_embedding": True} | changes)))


def eagle1(
    name: str,
    bias: bool = True,
    qkv_bias: bool = False,
    own: bool = False,
    own_head: bool = False,
    seed: int = 6,
) -> Eagle1Head:
    """Return a random EAGLE-1 head for `family(name)`."""
    torch.manual_seed(seed)
    layer = replace(eagle_config(name).layer, qkv_bias=qkv_bias)
    return _randomised(Eagle1Head(layer, load_config(family(name)).layers, bias, own, own_head))


def mtp(
    name: str, layer: dict[str, Any] | None = None, seed: int = 6, draft_vocab: int = VOCAB
) -> MtpModule:
    """Return a random multi-token module for `family(name)`."""
    torch.manual_seed(seed)
    c = eagle_config(name, layer).layer
    own = draft_vocab if draft_vocab < VOCAB else None
    return _randomised(MtpModule(c, load_config(family(name)).layers, own), c.vocab, draft_vocab)


def block_config(name: str, layer: dict[str, Any] | None = None, **changes: Any) -> BlockConfig:
    """Return the shape of a block drafter for `family(name)` with all heads; `layer` changes fields
    of its layers."""
    target = load_config(family(name))
    fields = dict(
        model_type="qwen3", hidden_size=target.hidden, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, vocab_size=target.vocab,
    )  # fmt: skip
    settings: dict[str, Any] = dict(
        target_hidden=target.hidden, aux_hidden_layers=(2, 0, target.layers), draft_vocab=target.vocab, block=4, mask_token=0,
        markov=MarkovShape(5), confidence=True, confidence_with_markov=True,
    )  # fmt: skip
    own_layer = make_config(fields | (layer or {}), Path("config.json"))
    return BlockConfig(layer=own_layer, **settings | changes)


def block(config: BlockConfig, seed: int = 7) -> BlockHead:
    """Return a random block drafter of that shape."""
    torch.manual_seed(seed)
    return _randomised(BlockHead(config), config.layer.vocab, config.draft_vocab)


def _randomised(module: M, vocab: int = 0, draft_vocab: int = 0) -> M:
    """Randomise a drafter's weights, and choose its tokens if it has a smaller vocabulary. Its
    logits depend on all of its inputs."""
    with torch.no_grad():
        for value in module.parameters():
            value.normal_(0.0, 0.5 if value.ndim > 1 else 0.1).add_(1.0 if value.ndim == 1 else 0.0)
    if getattr(module, "d2t", None) is not None:
        module.set_token_ids(torch.randperm(vocab)[:draft_vocab].sort().values)
    return module.requires_grad_(False)


@functools.cache
def with_tokenizer(noise: float = 0.0) -> Path:
    """Write a tiny Llama with a byte-level tokenizer that has tokens for some JSON; with `noise` it
    often agrees with the one without."""
    directory = new_directory("with_tokenizer-")
    _write(hf_model("llama", gain=0.7, vocab_size=PADDED_VOCAB), noise, directory)
    return directory


@functools.cache
def repetitive(noise: float = 0.0) -> Path:
    """Write a tiny Llama called "tiny", with that tokenizer and a context of LONG_CONTEXT, that generates
    repetitive ASCII.

    Most tokens have one likely successor, in cycles of eight: greedy decoding ends in a loop, and
    sampling leaves a cycle every few tokens, so that drafts are partly accepted. `noise` as in
    `with_tokenizer`."""
    directory = new_directory("repetitive-") / "tiny"
    tokenizer = _tokenizer()
    model = hf_model(
        "llama", gain=0.7, vocab_size=PADDED_VOCAB, max_position_embeddings=LONG_CONTEXT
    )
    texts = [tokenizer.decode([token]) for token in range(PADDED_VOCAB)]
    ascii_ids = [
        i
        for i, text in enumerate(texts)
        if text and text.isascii() and (text.isprintable() or text == "\n")
    ]
    random.Random(0).shuffle(ascii_ids)  # so that the tokenizer seldom merges successive tokens
    rings = [ascii_ids[at : at + 8] for at in range(0, len(ascii_ids), 8)]
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        # channel 0 stays constant, so its weights in the head are biases
        embedding.mul_(2.0)[:, 0] = 2.0
        for layer in model.model.layers:  # the context matters less than the last token
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_(0.05)[0] = 0.0
        model.model.norm.weight.fill_(1.0)
        head.zero_()[:, 0] = -30.0
        for ring in rings:
            head[[*ring[1:], ring[0]]] = 0.35 * embedding[ring]
        head[ascii_ids, 0] = 0.0
    _write(model, noise, directory)
    return directory


def _write(model: Any, noise: float, directory: Path) -> None:
    """Write a model plus noise, and the tokenizer."""
    _add_noise(model, noise)
    model.save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (directory / "tokenizer_config.json").write_text(settings)


@functools.cache
def _tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer with some words of JSON."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        '{"name":"alpha","colour":"green","sizes":[10,12],"next":{"name":"beta"}}',
        "true false null alphabet grey",
    ]
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=312, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts * 20, trainer)
    return tokenizer


@functools.cache
def decoder(
    directory: Path,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    shortlist: tuple[int, ...] | None = None,
) -> Decoder:
    """Return a loaded decoder with a context of 256, shared by tests; `shortlist` are the token ids
    that it scores."""
    ids = shortlist and torch.tensor(shortlist)
    return load_decoder(directory, dtype, torch.device(device), 256, ids)


@functools.cache
def native_decoder(
    path: Path, shortlist: tuple[int, ...] | None = None, form: str = "bfloat16"
) -> NativeDecoder:
    """Return a decoder on native kernels; quantised weights stay, others are in `form`."""
    native.start(2)
    ids = shortlist and torch.tensor(shortlist)
    return NativeDecoder(load_config(path), path, form, 256, keep=True, shortlist=ids)
