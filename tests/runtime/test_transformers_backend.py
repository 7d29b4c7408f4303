"""Families that run on transformers' modules: logits of prompts, steps and trees equal those of
transformers, drafts do not change the output, and other families are refused.

All parameters are random, even those that start as 0 or 1, so that every term is tested."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.cache.attention import Segment
from forerun.catalog.survey import survey
from forerun.config import Config
from forerun.draft.eagle.formats import EagleConfig
from forerun.draft.eagle.module import save_head
from forerun.draft.medusa import MedusaHeads, save_heads
from forerun.draft.proposer import view_of
from forerun.errors import CapacityError, ConfigError, ForerunError, LoadError
from forerun.load import make_runner
from forerun.models.config import load_config, make_config
from forerun.models.local import LocalModel
from forerun.models.mixed_families import FAMILIES
from forerun.models.transformers_config import transformers_config
from forerun.runtime.torch_runner import Runner
from forerun.runtime.transformers_backend import TransformersDecoder
from tests import tiny

CPU = torch.device("cpu")
VOCAB = 96
WINDOW = 8
TOLERANCE = 1e-4
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
ROUTED = dict(moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
)  # fmt: skip
GATED_DELTA = dict(
    head_dim=16, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * 2

# comments say what each adds to the others
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", BASE),  # norms after the branches, and over all heads
    "olmo3": ("olmo3", BASE | dict(sliding_window=WINDOW)),  # windows in three of four layers
    "glm4": ("glm4", BASE | dict(head_dim=8)),  # neighbouring channels rotate
    "exaone4": ("exaone4", BASE | dict(head_dim=8, sliding_window=WINDOW, sliding_window_pattern=4)),
    "cohere2": (  # parallel branches, scaled logits
        "cohere2",
        BASE | dict(sliding_window=WINDOW, logit_scale=0.5, layer_types=ALTERNATING),
    ),
    "deepseek_v3": (  # latent attention: keys and values of other widths, one head
        "deepseek_v3",
        BASE | LATENT | ROUTED | dict(first_k_dense_replace=1, n_group=2, topk_group=1),
    ),
    "phi": ("phi", BASE | dict(partial_rotary_factor=0.5)),
    "stablelm": ("stablelm", BASE | dict(partial_rotary_factor=0.5)),
    "gpt_neox": ("gpt_neox", {k: v for k, v in BASE.items() if k != "num_key_value_heads"}),
    "starcoder2": ("starcoder2", BASE | dict(sliding_window=WINDOW)),  # windows, no layer_types
    "opt": (  # learned positions
        "opt",
        dict(
            vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "granite": (  # factors of embeddings, branches and logits
        "granite",
        BASE | dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0),
    ),
    "gpt_oss": (  # attention sinks, experts
        "gpt_oss",
        BASE | dict(head_dim=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=WINDOW),
    ),
    "gemma4": (  # head sizes by layer, layers that share keys, embeddings by layer
        "gemma4_text",
        BASE | dict(
            head_dim=8, global_head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING,
            final_logit_softcapping=30.0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2, use_double_wide_mlp=True,
        ),
    ),
    "llama4": (  # chunks instead of windows
        "llama4_text",
        BASE | dict(
            head_dim=8, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
            interleave_moe_layer_step=2, attention_chunk_size=WINDOW,
        ),
    ),
    "gemma2": (  # a softcap on scores
        "gemma2",
        BASE | dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=WINDOW, attn_logit_softcapping=5.0),
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def without_native_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide forerun's own decoders of these families."""
    recurrent = ("qwen3_next", "lfm2", "falcon_h1")
    for family in (*recurrent, *(model_type for model_type, _ in KINDS.values())):
        monkeypatch.delitem(FAMILIES, family, raising=False)


def randomise(module: Any) -> Any:
    """Set all parameters, and the buffers that are saved, to random values."""
    with torch.no_grad():
        saved = module.state_dict()
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if name not in saved or not value.is_floating_point():
                continue
            if value.ndim > 1:
                value.normal_(0.0, 0.25)
            else:
                value.add_(torch.randn_like(value) * (0.1 if "norm" in name else 0.3))
    return module


def make(model_type: str, fields: dict[str, Any], seed: int = 0) -> Any:
    """Return a random transformers module of this family."""
    torch.manual_seed(seed)
    config = hf.AutoConfig.for_model(model_type, **fields)
    return randomise(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def write(module: Any) -> Path:
    """Save the module in a new directory."""
    directory = tiny.new_directory("foreign-")
    module.save_pretrained(directory)
    return directory


@functools.cache
def saved(kind: str, seed: int = 0) -> Path:
    return write(make(*KINDS[kind], seed))


@functools.cache
def hf_module(kind: str) -> Any:
    """Return the module as transformers loads it."""
    return hf.AutoModelForCausalLM.from_pretrained(
        saved(kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@functools.cache
def decoder(kind: str) -> TransformersDecoder:
    config = transformers_config(saved(kind))
    return TransformersDecoder(config, saved(kind), torch.float32, CPU, 256)


def runner(kind: str, slots: int = 4) -> Runner:
    return Runner(decoder(kind), tokens=512, page=4, slots=slots)


@torch.no_grad()
def hf_logits(kind: str, text: Sequence[int]) -> Tensor:
    """Return transformers' logits after each token of a text, [T, V]."""
    logits: Tensor = hf_module(kind)(torch.tensor([text])).logits[0]
    return logits


def some_text(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB) for _ in range(length)]


def chain(slot: int, tokens: Sequence[int], want: Sequence[int] | None = None) -> Segment:
    wanted = list(range(len(tokens))) if want is None else list(want)
    return Segment(slot, list(tokens), list(range(-1, len(tokens) - 1)), wanted)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


# ---------------------------------------------------------------- logits


@pytest.mark.one_in(4)
@kinds
def test_logits_of_prompts_in_chunks_equal_those_of_transformers(kind: str) -> None:
    """Two texts, longer than the windows, in chunks of varying length and fragmented pages."""
    model, texts = runner(kind), [some_text(1, 45), some_text(2, 30)]
    lengths = [[20, 1, 3, 17, 4], [7, 2, 9, 9, 3]]
    got: list[list[Tensor]] = [[], []]
    starts = [0, 0]
    for counts in zip(*lengths, strict=True):
        segments = []
        for slot, count in enumerate(counts):
            model.cache.pages.grow(slot, starts[slot] + count)
            segments.append(chain(slot, texts[slot][starts[slot] : starts[slot] + count]))
        logits = model.forward(segments).logits
        for slot, part in enumerate(logits.split(counts)):
            got[slot].append(part)
            model.cache.commit(slot, range(counts[slot]))
            starts[slot] += counts[slot]
    for text, parts in zip(texts, got, strict=True):
        close(torch.cat(parts), hf_logits(kind, text))


@pytest.mark.one_in(4)
@kinds
def test_logits_of_one_token_steps_equal_those_of_transformers(kind: str) -> None:
    model, text = runner(kind), some_text(3, 24)
    model.cache.pages.grow(0, len(text))
    got = []
    for token in text:
        got.append(model.forward([chain(0, [token])]).logits)
        model.cache.commit(0, [0])
    close(torch.cat(got), hf_logits(kind, text))


@kinds
def test_logits_of_tree_nodes_equal_those_of_their_paths(kind: str) -> None:
    """The prompt is longer than the windows, another request runs beside it, and a branch that is
    not contiguous is committed."""
    model, text, beside = runner(kind), some_text(4, 21), some_text(5, 6)
    model.cache.pages.grow(0, 64)
    model.cache.pages.grow(1, 64)
    model.forward([chain(0, text, []), chain(1, beside[:4], [])])
    model.cache.commit(0, range(len(text)))
    model.cache.commit(1, range(4))
    tree = Segment(0, some_text(6, 7), [-1, 0, 0, 1, 2, 4, 1], [0, 1, 2, 3, 4, 5, 6])
    logits = model.forward([tree, chain(1, beside[4:])]).logits
    for node in range(len(tree.tokens)):
        close(logits[node], hf_logits(kind, [*text, *path_of(tree, node)])[-1])
    close(logits[len(tree.tokens) :], hf_logits(kind, beside)[4:])
    model.cache.commit(0, [0, 2, 4, 5])
    kept = [*text, *path_of(tree, 5)]
    close(model.forward([chain(0, [11, 12])]).logits, hf_logits(kind, [*kept, 11, 12])[-2:])


def path_of(tree: Segment, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path


def test_prefixes_are_shared_and_rows_are_rewound() -> None:
    model, text = runner("olmo2"), some_text(7, 16)
    model.cache.pages.grow(0, 16)
    model.forward([chain(0, text, [])])
    model.cache.commit(0, range(16))
    model.cache.pages.seal(0, text, 16)
    assert model.cache.open(1, [*text, 5, 6]) == 16
    model.cache.pages.grow(1, 18)
    expected = hf_logits("olmo2", [*text, 5, 6])[-2:]
    close(model.forward([chain(1, [5, 6])]).logits, expected)
    model.cache.commit(1, [0, 1])
    model.cache.rewind(1, 16)
    close(model.forward([chain(1, [5, 6])]).logits, expected)


# ---------------------------------------------------------------- what drafters read


@pytest.mark.parametrize("kind", ["olmo2", "cohere2", "granite", "gpt_neox", "gemma2"])
def test_hidden_states_and_the_target_view_of_heads(kind: str) -> None:
    """Compares the input of each layer and the output of the last one; the view's embedding, norm
    and head give the first input and the logits."""
    model, text = runner(kind), some_text(8, 12)
    model.cache.pages.grow(0, 12)
    layers = range(decoder(kind).config.layers + 1)
    out = model.forward([chain(0, text)], tuple(layers))
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in hf_module(kind).get_decoder().layers
    ]
    expected = hf_logits(kind, text)
    for hook in hooks:
        hook.remove()
    for layer, states in enumerate(inputs):
        close(out.features[layer], states[0])
    view = view_of(model.decoder)
    close(view.embed(torch.tensor(text)), out.features[0])
    close(view.head(view.normalise(out.features[layers[-1]])), expected)


# ---------------------------------------------------------------- generation

OPTIONS: dict[str, Any] = dict(kv_tokens=80, page=4, max_rows=4, chunk=5, context=80, depth=4)


def prompts() -> list[list[int]]:
    """Return texts that repeat themselves, so that suffix drafts something."""
    return [[*(some_text(seed, 6) * 3), *some_text(seed, 2)] for seed in range(5)]


def params(temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=16, ignore_eos=True
    )  # fmt: skip


@functools.cache
def similar(kind: str) -> Path:
    """Write a draft model whose drafts are often accepted."""
    module = make(*KINDS[kind])
    torch.manual_seed(1)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(torch.randn_like(value) * 0.02)
    return write(module)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("olmo3", 0.0), ("olmo3", 0.8), ("deepseek_v3", 0.8), ("gpt_oss", 0.0), ("gemma4", 0.8)],
)
def test_drafts_do_not_change_the_output(kind: str, temperature: float) -> None:
    """Copies and trees of a draft model, in a small pool, so that some requests are preempted."""
    drafts = ["suffix", f"model:{similar(kind)}"]
    with LLM(saved(kind), backend="transformers", draft=drafts, width=2, **OPTIONS) as llm:
        plain = [llm.generate(p, params(temperature), draft="off")[0] for p in prompts()]
        for draft in ("suffix", "model"):
            drafted = llm.generate(prompts(), params(temperature), draft=draft)
            assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
            assert sum(c.stats.drafted for c in drafted) > 0
            assert sum(c.stats.preemptions for c in drafted) > 0
    assert sum(c.stats.accepted for c in drafted) > 0
    assert all(len(c.token_ids) == 16 for c in plain)


def test_every_drafter_works_with_a_transformers_target(tmp_path: Path) -> None:
    """Copying drafters, a draft model that runs on transformers, too, and heads."""
    drafts = ["ngram", "suffix", "recycle", f"model:{similar('phi')}", "auto"]
    heads = MedusaHeads(3, 1, BASE["hidden_size"], VOCAB)
    heads.begin(hf_module("phi").lm_head.weight.detach())
    save_heads(heads, tmp_path / "heads", torch.float32)
    drafts.append(f"medusa:{tmp_path / 'heads'}")
    layer = dict(model_type="llama", max_position_embeddings=128)
    config = EagleConfig(
        layer=make_config(BASE | layer | dict(num_hidden_layers=1), Path("config.json")),
        target_hidden=BASE["hidden_size"],
        aux_hidden_layers=(2, 0, BASE["num_hidden_layers"]),
        draft_vocab=VOCAB,
    )
    save_head(tiny.eagle(config), tmp_path / "head")
    drafts.insert(0, f"eagle3:{tmp_path / 'head'}")
    with LLM(saved("phi"), draft="off", **OPTIONS) as llm:
        expected = [llm.generate(p, params(0.8))[0].token_ids for p in prompts()]
    for draft in drafts:
        with LLM(saved("phi"), draft=draft, **OPTIONS) as llm:
            completions = llm.generate(prompts(), params(0.8))
        assert [c.token_ids for c in completions] == expected, draft
        if draft.startswith(("model", "medusa", "eagle3", "recycle")):
            assert sum(c.stats.drafted for c in completions) > 0, draft
    assert sum(c.stats.accepted for c in completions) > 0


def test_native_and_transformers_models_draft_for_each_other(tmp_path: Path) -> None:
    """Target and draft model choose their backends independently."""
    native = tmp_path / "native"
    module = make("llama", BASE)
    module.save_pretrained(native)
    threads = torch.get_num_threads()
    for target, drafter in ((saved("phi"), native), (native, saved("phi"))):
        with LLM(target, draft="off", **OPTIONS) as llm:
            expected = llm.generate(prompts(), params(0.8))
        with LLM(target, draft=f"model:{drafter}", **OPTIONS) as llm:
            completions = llm.generate(prompts(), params(0.8))
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
        assert sum(c.stats.drafted for c in completions) > 0
    torch.set_num_threads(threads)


def test_a_module_in_bfloat16_passes_the_load_check_and_generates() -> None:
    with LLM(saved("olmo2"), dtype="bfloat16", draft="suffix", **OPTIONS) as llm:
        assert llm.decoder.precision == "bfloat16, transformers on cpu"
        assert len(llm.generate(prompts()[0], params(0.0))[0].token_ids) == 16


# ---------------------------------------------------------------- choosing the backend


def test_auto_uses_transformers_for_other_families_with_a_one_line_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = Config.of(kv_tokens=64, max_rows=1)
    model = make_runner(options, saved("stablelm", 3), CPU)
    note = capsys.readouterr().err
    assert isinstance(model.decoder, TransformersDecoder)
    assert "stablelm" in note and "slower" in note and len(note.splitlines()) == 1
    make_runner(Config.of(kv_tokens=64, max_rows=1, backend="transformers"), saved("phi", 3), CPU)
    assert capsys.readouterr().err == "", "no note if the user chose the backend"


def test_a_native_family_runs_on_transformers_only_on_request() -> None:
    path = tiny.family("llama")
    options = Config.of(kv_tokens=64, max_rows=1, dtype="float32", backend="transformers")
    module, native = (make_runner(o, path, CPU) for o in (options, Config.of(kv_tokens=64)))
    assert isinstance(module.decoder, TransformersDecoder)
    assert not isinstance(native.decoder, TransformersDecoder)
    assert module.decoder.weight_bytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "forerun"}, "has no family phi"),
        ({"kernels": "native"}, "no kernels=native"),
        ({"quantization": "int8"}, "no quantization int8"),
        ({"tensor_parallel": 2}, "no tensor_parallel=2"),
        ({"backend": "transformers", "quantization": "int8"}, "leave"),
        ({"draft": "self:layers=2"}, "self:layers"),
        ({"draft": "self:int8"}, "no quantization int8"),
        ({"context": 1000}, "over what this model can serve"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(saved("phi"), **options)
    assert "\n" not in str(caught.value)


def test_gguf_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="GGUF"):
        LLM(tiny.family("llama/Q8_0"), backend="transformers")


def test_a_kv_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="kv_tokens"):
        LLM(saved("phi"), kv_tokens=1 << 32)


def test_a_language_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    """Sizes and end tokens are those of text_config; the vision model does not run."""
    torch.manual_seed(0)
    text = BASE | dict(model_type="mistral", head_dim=8, eos_token_id=5)
    vision = dict(
        model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    config = hf.AutoConfig.for_model("mistral3", text_config=text, vision_config=vision)
    module = randomise(hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    module.eval().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    shape = transformers_config(tmp_path)
    assert (shape.vocab, shape.layers, shape.end_ids) == (VOCAB, 4, (5,))
    loaded = TransformersDecoder(shape, tmp_path, torch.float32, CPU, 64)
    model, tokens = Runner(loaded, tokens=64, page=4, slots=1), some_text(1, 9)
    model.cache.pages.grow(0, 9)
    with torch.no_grad():
        expected = module(torch.tensor([tokens])).logits[0]
    close(model.forward([chain(0, tokens)]).logits, expected)


def test_longrope_is_served_with_its_short_factors() -> None:
    """Long factors would apply to the whole batch, so that a long request would change others."""
    fields = BASE | dict(
        original_max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
            partial_rotary_factor=1.0,
        ),
    )  # fmt: skip
    assert transformers_config(write(make("phi3", fields))).context == 64


# ---------------------------------------------------------------- refusals


def refusal(directory: Path) -> str:
    with pytest.raises(ForerunError) as caught:
        LLM(directory, draft="off", kv_tokens=64)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_next", GATED_DELTA | EXPERTS | dict(shared_expert_intermediate_size=16)),
        (
            "falcon_h1",
            dict(
                mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_d_ssm=64
            ),
        ),
        ("lfm2", dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)),
    ],
)
def test_recurrent_families_are_refused(model_type: str, fields: dict[str, Any]) -> None:
    directory = write(make(model_type, BASE | fields))
    message = refusal(directory)
    assert model_type in message and "recurrent state" in message
    (row,) = survey([LocalModel("name", directory, "directory")])
    assert not row.runs and "recurrent state" in row.reason


def test_unsupported_families_are_refused_with_a_reason() -> None:
    bloom = make("bloom", dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))
    assert "bloom" in (message := refusal(write(bloom))) and "cannot be replaced" in message
    doge = make("doge", BASE)
    assert "doge" in (message := refusal(write(doge))) and "changes its attention masks" in message
    fields = KINDS["llama4"][1] | dict(floor_scale=8)
    message = refusal(write(make("llama4_text", fields)))
    assert "llama4_text" in message and "length of the cache" in message


def test_families_on_transformers_are_listed() -> None:
    (row,) = survey([LocalModel("name", saved("phi"), "directory")])
    assert row.runs and (row.family, row.backend) == ("phi", "transformers")


def changed(directory: Path, **fields: Any) -> Path:
    """Return a copy of the directory with other fields in config.json."""
    copy = tiny.new_directory("changed-") / "model"
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "none_such"}, "model_type 'none_such' is not supported"),
        ({"model_type": "mistral44"}, "did you mean 'mistral4'?"),  # transformers has only mistral
        ({"model_type": "t5"}, "model_type 't5' is not supported"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 5}, "incomplete"),
        ({"num_hidden_layers": "four"}, "cannot read this configuration"),
        ({"hidden_size": 1 << 30}, ""),
        ({"vocab_size": 1 << 62}, "vocab"),
        ({"vocab_size": 97}, ""),
        ({"num_attention_heads": 0}, ""),
        ({"max_position_embeddings": 1 << 40}, "context"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"hidden_act": "none_such"}, ""),
        ({"rope_parameters": {"rope_type": "none_such"}}, ""),
    ],
)
def test_broken_configurations_raise_one_line_errors(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(changed(saved("phi"), **fields))


def test_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """Attention and expert implementations that a configuration names are ignored, too."""
    ran = tmp_path / "ran"
    directory = changed(
        saved("phi"),
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        attn_implementation="someone/kernel",
        _attn_implementation="someone/kernel",
        experts_implementation="someone/kernel",
        transformers_weights="../../weights.safetensors",
    )
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    make_runner(Config.of(kv_tokens=64, max_rows=1), directory, CPU)
    assert not ran.exists()


def test_weights_are_read_from_safetensors_only() -> None:
    directory = changed(saved("phi"))
    torch.save(hf_module("phi").state_dict(), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="safetensors"):
        LLM(directory, draft="off", kv_tokens=64)


def test_load_config_describes_a_transformers_model() -> None:
    shape = load_config(saved("phi"))
    assert (shape.family, shape.layout, shape.context) == ("phi", "transformers", 256)
    assert (shape.vocab, shape.hidden, shape.end_ids) == (VOCAB, 32, (2,))
