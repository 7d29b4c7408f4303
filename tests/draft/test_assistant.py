"""Gemma 4's assistants: they compute what transformers computes, change no text, and are refused if
they do not fit."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams
from forerun.cache.attention import Segment
from forerun.catalog.facts import facts_at
from forerun.catalog.fit import checks, draft_argument, sizes_of
from forerun.catalog.search import find_local
from forerun.draft.assistant import AssistantProposer, load_assistant
from forerun.draft.kinds import kind_of
from forerun.draft.proposer import view_of
from forerun.runtime.torch_runner import Runner
from tests import gguf_files, tiny
from tests.draft.helpers import make_request, needs_native

TARGETS = ("gemma4", "gemma4-small", "gemma4-moe")
TOKENS = [5, 6, 7, 9, 11, 3, 40, 17, 8, 33, 21, 60, 14, 14, 2, 51, 30]
DEPTH = 5


@torch.no_grad()
def expected_levels(
    target: str, ordered: bool, tokens: list[int], model: Any = None
) -> tuple[list[Tensor], list[int]]:
    """Return the logits and greedy tokens of each level by transformers' own models."""
    model, assistant = model or tiny.hf_model(target), tiny.assistant(target, ordered)[0]
    read = torch.tensor([tokens[:-1]])
    out = model(read, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    state, token = out.hidden_states[-1][:, -1:], torch.tensor([tokens[-1:]])
    position = torch.tensor([[len(tokens) - 1]])
    levels, drafted = [], []
    for _ in range(DEPTH):
        pair = torch.cat([model.get_input_embeddings()(token), state], dim=-1)
        step = assistant(
            inputs_embeds=pair,
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            position_ids=position,
            shared_kv_states=dict(out.shared_kv_states),
        )
        levels.append(step.logits[0, -1])
        token, state = step.logits.argmax(-1), step.last_hidden_state
        drafted.append(int(token))
    return levels, drafted


@functools.cache
def decoder(target: str, form: str | None) -> Any:
    if form is None:
        return tiny.decoder(tiny.family(target), torch.float32)
    return tiny.native_decoder(tiny.family(target), form=form)


def drafted(
    target: str, form: str | None, ordered: bool, texts: list[list[int]], width: int = 1
) -> tuple[list[Any], list[Tensor]]:
    """Return the drafts behind texts that the target has read, and the logits of each level."""
    made = decoder(target, form)
    view, runner = view_of(made, form or "int8"), Runner(made, tokens=256, page=4, slots=4)
    assistant = load_assistant(tiny.assistant(target.split("/")[0], ordered)[1], view)
    proposer = AssistantProposer("mtp", assistant, view, runner, width)
    levels: list[Tensor] = []
    step = assistant.step

    def recorded(*arguments: Any) -> tuple[Tensor, Tensor]:
        logits, state = step(*arguments)
        levels.append(logits)
        return logits, state

    assistant.step = recorded  # type: ignore[method-assign]
    requests = []
    for slot, tokens in enumerate(texts):
        proposer.open(slot, tokens)
        for start, end in ((0, 5), (5, len(tokens) - 1)):  # in two chunks
            runner.cache.pages.grow(slot, end)
            segment = Segment.chain(slot, tokens[start:end])
            states = runner.forward([segment], proposer.aux_hidden_layers).features
            runner.cache.commit(slot, range(end - start))
            proposer.observe(slot, start, states)
        requests.append(make_request(tokens, depth=DEPTH, slot=slot))
    return proposer.propose(requests), levels


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", [None, pytest.param("float32", marks=needs_native)])
@pytest.mark.parametrize("target", TARGETS)
def test_each_level_equals_transformers(target: str, form: str | None, ordered: bool) -> None:
    """This holds in torch and with native products; the text is longer than the windows."""
    expected, tokens = expected_levels(target, ordered, TOKENS)
    (draft,), levels = drafted(target, form, ordered, [TOKENS])
    assert draft.tokens[1:] == tokens and len(levels) == DEPTH
    for own, theirs in zip(levels, expected, strict=True):
        scored = own[0].isfinite()
        assert scored.sum() == (5 * 4 if ordered else tiny.VOCAB)
        assert torch.allclose(own[0][scored], theirs[scored], atol=1e-4)
        assert (theirs[~scored] < own[0][scored].min()).all()


@pytest.mark.parametrize("form", [None, pytest.param("float32", marks=needs_native)])
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_do_not_depend_on_the_batch(width: int, form: str | None) -> None:
    """Texts are shorter and longer than the windows."""
    texts = [TOKENS, TOKENS[:7], TOKENS[3:]]
    together, _ = drafted("gemma4-small", form, False, texts, width)
    for text, draft in zip(texts, together, strict=True):
        ((alone,), _) = drafted("gemma4-small", form, False, [text], width)
        assert (draft.tokens, draft.parents) == (alone.tokens, alone.parents)
        assert len(draft) == 1 + width * DEPTH and max(draft.depths()) == DEPTH


@pytest.mark.parametrize("native_layout", [False, pytest.param(True, marks=needs_native)])
def test_the_cache_is_read_in_both_layouts(native_layout: bool) -> None:
    """Reading a slot returns the rows that its forward passes wrote, in the text's order."""
    made = decoder("gemma4", "float32" if native_layout else None)
    runner = Runner(made, tokens=64, page=4, slots=2)
    rows = {}
    for slot in (1, 0):  # pages of the first slot come after the other's
        runner.cache.pages.grow(slot, len(TOKENS))
        segment = Segment.chain(slot, TOKENS)
        runner.forward([segment])
        runner.cache.commit(slot, range(len(TOKENS)))
        rows[slot] = [runner.cache.read(slot, layer, 6) for layer in range(4)]
    for layer, (keys, values) in enumerate(rows[0]):
        assert keys.shape == values.shape == (len(TOKENS) - 6, *made.config.head_shape(layer))
        assert torch.equal(keys, rows[1][layer][0]) and torch.equal(values, rows[1][layer][1])
    all_keys, all_values = runner.cache.read(0, 0, 0)
    assert torch.equal(all_keys[6:], rows[0][0][0]) and torch.equal(all_values[6:], rows[0][0][1])


def test_an_assistant_drafts_for_its_target() -> None:
    directory = tiny.assistant("gemma4")[1]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)
    outputs = []
    for draft in ("off", f"mtp:{directory}", f"suffix+mtp:{directory}"):
        with LLM(str(tiny.family("gemma4")), draft=draft, kernels="torch", depth=3) as llm:
            (result,) = llm.generate([TOKENS], params)
            outputs.append(result.token_ids)
            assert draft == "off" or result.stats.by_source["mtp"].drafted > 0
    assert outputs[0] == outputs[1] == outputs[2]


def changed(fields: dict[str, Any]) -> Path:
    """Copy an assistant's directory with other fields in its config.json; names that begin with
    `text.` are those of its layers' part."""
    directory = tiny.new_directory("changed-") / "assistant"
    shutil.copytree(tiny.assistant("gemma4", True)[1], directory)
    raw = json.loads((directory / "config.json").read_text())
    for name, value in fields.items():
        part = raw["text_config"] if name.startswith("text.") else raw
        part[name.removeprefix("text.")] = value
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "text_config in config.json is None"),
        ({"text.model_type": "gemma4_unified_text"}, "only gemma4_text is supported"),
        ({"backbone_hidden_size": 48}, "is for a target with states of 48"),
        ({"num_centroids": 15}, "15, which does not divide 64"),
        ({"centroid_intermediate_top_k": 17}, "centroid_intermediate_top_k in config.json is 17"),
        ({"use_ordered_embeddings": 1}, "use_ordered_embeddings in config.json is 1"),
        ({"use_ordered_embeddings": False}, "masked_embedding"),
        ({"text.hidden_size_per_layer_input": 8}, "embeddings of their own"),
        ({"text.per_layer_config": {"3": {"head_dim": 8}}}, "layer 3 reads keys of (2, 8) heads"),
        ({"text.intermediate_size": 41}, "mlp"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_assistant(changed(fields), view_of(decoder("gemma4", None)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_refused() -> None:
    view = view_of(decoder("gemma4", None))
    for change, message in (
        (
            lambda tensors: tensors.pop("post_projection.weight"),
            "lacks tensor post_projection.weight",
        ),
        (lambda tensors: tensors.update(other=torch.ones(1)), "other"),
        (lambda tensors: tensors["pre_projection.weight"].fill_(torch.nan), "not finite"),
        (lambda tensors: tensors["masked_embedding.token_ordering"].zero_(), "does not name each"),
    ):
        directory = changed({})
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(LoadError, match=message):
            load_assistant(directory, view)


def test_targets_of_other_kinds_are_refused() -> None:
    directory = tiny.assistant("gemma4")[1]
    with pytest.raises(LoadError, match="for targets of the family gemma4_text"):
        load_assistant(directory, view_of(tiny.decoder(tiny.family("llama"))))
    with pytest.raises(LoadError, match="transformers' own module"):
        LLM(str(tiny.family("gemma4")), draft=f"mtp:{directory}", backend="transformers")
    with pytest.raises(LoadError, match="give --draft mtp:"):
        LLM(str(tiny.family("gemma4")), draft=f"model:{directory}")


def test_assistants_are_found_beside_their_targets() -> None:
    """The sizes of the states and the vocabulary decide, or the name in a model card."""
    directory = tiny.assistant("gemma4")[1]
    assert kind_of(directory) == "mtp"
    facts = facts_at(directory, str(directory))
    target = facts_at(tiny.family("gemma4"), "gemma4")
    assert facts.kind.family == "gemma4_assistant"
    assert draft_argument(facts) == f"mtp:{facts.name}"
    found = {check.name: check.ok for check in checks(facts, sizes_of(target))}
    assert found == {"vocabulary": True, "hidden size": True, "forerun": True}
    listed, _ = find_local(str(tiny.family("gemma4")), [directory.parent])
    assert f"mtp:{directory}" in [drafter.draft for drafter in listed]
    wide = changed({"backbone_hidden_size": 48})
    wider = facts_at(wide, str(wide))
    assert not all(check.ok for check in checks(wider, sizes_of(target)))
    other = replace(facts, raw=facts.raw | {"text_config": {"model_type": "gemma4_unified_text"}})
    assert "only gemma4_text is supported" in checks(other, None)[0].text


@needs_native
@pytest.mark.parametrize("target", ["gemma4/F32", "gemma4-small/F32"])
def test_drafts_for_targets_in_gguf_files_are_the_same(target: str) -> None:
    """The drafts are those for the checkpoint that the file was made from."""
    written = gguf_files.written(*target.split("/"))
    name = target.split("/")[0]
    expected, tokens = expected_levels(name, False, TOKENS, copy.deepcopy(written.model).float())
    (draft,), levels = drafted(target, "float32", False, [TOKENS])
    assert draft.tokens[1:] == tokens
    for own, theirs in zip(levels, expected, strict=True):
        assert torch.allclose(own[0], theirs, atol=1e-4)
