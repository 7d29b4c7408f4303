"""Each check passes drafters that fit and fails those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.catalog.facts import Facts
from forerun.catalog.fit import (
    FitCheck,
    Sizes,
    aux_hidden_layers,
    bare_name,
    checks,
    fits,
    same_model,
    sizes_of,
)
from forerun.errors import LoadError
from tests.catalog.hub import eagle_config, eagle_shapes, target_config

TARGET = Sizes(
    "org/Big-8B",
    hidden_size=16,
    num_layers=8,
    vocab_size=64,
    parameters=1000,
    bytes=2000,
    vocabulary="json a",
)


def head(shapes: dict[str, Any] | None = None, **changed: Any) -> Facts:
    return Facts(
        "a/head", raw=eagle_config(**changed), shapes=eagle_shapes() if shapes is None else shapes
    )


def by_name(drafter: Facts, target: Sizes | None = TARGET) -> dict[str, FitCheck]:
    return {check.name: check for check in checks(drafter, target)}


def test_every_check_passes_for_a_head_that_fits() -> None:
    found = by_name(head())
    assert all(check.ok for check in found.values()) and fits(list(found.values()))
    names = ["target", "vocabulary", "hidden size", "layers", "fusion", "embedding", "forerun"]
    assert list(found) == names
    assert "--draft eagle3:a/head" in found["forerun"].text and "[2, 4, 5]" in found["layers"].text
    assert list(by_name(head(), None)) == ["forerun"]


LAYER = target_config(num_hidden_layers=1)
DSPARK = {"speculators_model_type": "dspark"}
MEDUSA = {"model_type": "medusa", "num_heads": 2, "hidden_size": 16, "vocab_size": 63}
BAD: list[tuple[Facts, str, str]] = [
    (head(transformer_layer_config=LAYER | {"vocab_size": 65}), "vocabulary", "for 65 tokens, the target has 64"),
    (head(eagle_shapes(d2t=None)), "vocabulary", "d2t, has none"),
    (head(eagle_shapes(d2t=(31,))), "vocabulary", "has 31"),
    (head(target_hidden_size=32), "hidden size", "states of 32, the target has 16"),
    (head(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "layers", "not different numbers from 0 to 8"),
    (head(eagle_aux_hidden_state_layer_ids=[2, 2, 4]), "layers", "not different"),
    (head(eagle_aux_hidden_state_layer_ids=[-1, 2, 4]), "layers", "not different"),
    (head(eagle_aux_hidden_state_layer_ids="2"), "layers", "not a list of layer numbers"),
    (head(eagle_aux_hidden_state_layer_ids=[2, 4]), "fusion", "reads 48 numbers, 2 states have 32"),
    (head(transformer_layer_config=LAYER | {"hidden_size": 8}), "embedding", "of 16 numbers, for states of 8"),
    (head(eagle_shapes(embed_tokens__weight=(65, 16))), "embedding", "65 tokens, the target has 64"),
    (head(transformer_layer_config=LAYER | {"model_type": "gemma3"}), "forerun", "family 'gemma3'"),
    (head(transformer_layer_config=LAYER | {"num_hidden_layers": 2}), "forerun", "2 layers"),
    (head(transformer_layer_config=LAYER | {"attention_bias": True}), "forerun", "biases"),
    (head(eagle_shapes(fc__weight=None)), "forerun", "no fc.weight"),
    *(
        (Facts("a/b", raw=DSPARK | {"aux_hidden_state_layer_ids": ids}), "layers", "not a list of hidden states")
        for ids in ("24", [], [1.5, 2], [True])
    ),
    (Facts("a/b", raw=MEDUSA), "vocabulary", "for 63 tokens"),  # only EAGLE-3 may leave out the padding
    (Facts("a/b", raw=eagle_config(speculators_model_type="other")), "forerun", "does not read this kind"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "name", "text"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mismatch_fails_its_check(drafter: Facts, name: str, text: str) -> None:
    found = by_name(drafter)
    assert found[name].ok is False and text in found[name].text
    assert not fits(list(found.values()))


def test_unknown_properties_are_not_failures() -> None:
    """Names cannot prove that a head is for another target, and pickled weights have no shapes."""
    other = by_name(head(speculators_config={"verifier": {"name_or_path": "org/Other-8B"}}))
    assert other["target"].ok is None
    assert "made for org/Other-8B" in other["target"].text
    assert fits(list(other.values()))
    assert fits(list(by_name(head({})).values()))
    assert by_name(head(eagle_shapes(embed_tokens__weight=(64, 16))))["embedding"].ok


FORMATS: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
    (eagle_config(), (2, 4, 5)),
    (eagle_config(eagle_aux_hidden_state_layer_ids=None), (2, 4, 5)),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, (2, 4, 5)),
    (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 3]}},
        (2, 4),
    ),
    ({"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 3]}, (0, 4)),
    ({"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2, 4]}, (2, 4)),
    ({"speculators_model_type": "mtp"}, None),
    ({"model_type": "medusa", "num_heads": 2}, None),
]


@pytest.mark.parametrize(("raw", "ids"), FORMATS)
def test_layer_ids_of_each_format_become_aux_hidden_layers(
    raw: dict[str, Any], ids: tuple[int, ...] | None
) -> None:
    assert aux_hidden_layers(Facts("a/b", raw=raw), TARGET) == ids


def small(vocabulary: str = "json a", parameters: int = 300, **changed: Any) -> Facts:
    shapes = {"model.embed_tokens.weight": (parameters,)}
    return Facts(
        "a/small", raw=target_config(**changed), shapes=shapes, bytes=10, vocabulary=vocabulary
    )


def test_draft_models_are_checked_by_vocabulary_and_size() -> None:
    found = by_name(small())
    assert found["vocabulary"].ok
    assert found["size"].ok
    assert "30% of the target's parameters" in found["size"].text
    assert by_name(small(parameters=700))["size"].ok is False
    assert by_name(small("json b"))["vocabulary"].ok is None, "another file may hold the same"
    other = by_name(small("json b", vocab_size=32))["vocabulary"]
    assert other.ok is None and "through text" in other.text
    assert by_name(small(vocab_size="many"))["forerun"].ok
    assert by_name(small(model_type="mamba"))["forerun"].ok is False


def test_names_of_the_same_model_are_recognised() -> None:
    for name in (
        "org/Big-8B",
        "Big-8B",
        "them/Big-8B-GGUF:Q4_K_M",
        "x/big-8b.Q8_0.gguf",
        "/m/Big-8B-Q4_K_M.gguf",
    ):
        assert same_model(name, "org/Big-8B"), name
    assert same_model("ollama:big:8b", "Big-8B") and bare_name("ollama:qwen3:latest") == "qwen3"
    for name in ("", "org/Big-8B-Instruct", "org/Big-80B"):
        assert not same_model(name, "org/Big-8B"), name


def test_sizes_of_a_target_are_read_or_refused() -> None:
    assert sizes_of(Facts("t", raw={"text_config": target_config()})).hidden_size == 16
    assert sizes_of(Facts("t", raw={"n_embd": 4, "n_layer": 2, "vocab_size": 9})).num_layers == 2
    for wrong in (
        {},
        target_config(hidden_size="16"),
        target_config(vocab_size=True),
        target_config(vocab_size=1 << 40),
    ):
        with pytest.raises(LoadError, match="is no target"):
            sizes_of(Facts("t", raw=wrong))
