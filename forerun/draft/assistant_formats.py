"""The config.json of Gemma 4's assistants. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from forerun.draft.head_config import read_bool, read_int
from forerun.errors import LoadError, shown
from forerun.models.config import TRANSFORMERS, ModelConfig, make_config
from forerun.models.families import Json
from forerun.models.files import read_object

GEMMA_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # by `model_type`
ASSISTANT = "gemma4_assistant"  # the family of such drafters
LAYERS = "gemma4_text"  # the `model_type` of the layers, and that of the target's language model
ELSEWHERE = -1  # in `ModelConfig.kv_layers`: keys and values are those of another model


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """The shape of an assistant.

    Attributes:
        layers: its decoder layers, which have no keys and values of their own.
        target_hidden: size of the target's hidden states.
        centroids: the number of groups of tokens; 0 if all tokens are scored.
        used_centroids: the number of groups whose tokens are scored.
    """

    layers: ModelConfig
    target_hidden: int
    centroids: int = 0
    used_centroids: int = 0

    def windows(self) -> list[int | None]:
        """Return for each layer how many of the last committed keys it reads; None for all."""
        # transformers counts the keys before the last one, the target's windows count the query
        return [None if window is None else window + 1 for window in self.layers.windows]


def is_assistant(directory: Path) -> bool:
    """Return True if a directory holds an assistant, by its config.json."""
    try:
        return read_object(directory / "config.json").get("model_type") in GEMMA_ASSISTANTS
    except LoadError:
        return False  # loading it as a module tells what is wrong


def read_assistant(raw: Json) -> AssistantConfig:
    """Read the config.json of an assistant. Raises LoadError."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise LoadError(f"text_config in config.json is {shown(text)}, not an object")
    family = text.get("model_type", LAYERS)
    if family != LAYERS:
        raise LoadError(
            f"its layers are of the family {shown(family)}: only {LAYERS} is supported, since a"
            " target of another family runs on transformers' own module, which shows no keys"
        )
    # every layer reads keys of the target: none of them has to come after a layer with keys
    own = {"model_type": family, "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    layers = make_config(text | own, Path("config.json"))
    if layers.layer_input or layers.experts is not None:
        raise LoadError("its layers have embeddings of their own or experts, as no assistant has")
    layers = replace(
        layers, kv_layers=(ELSEWHERE,) * layers.layers, values_from_keys=(), logit_softcap=None
    )
    hidden = read_int(raw, "backbone_hidden_size", default=1536)
    if not read_bool(raw, "use_ordered_embeddings", False):
        return AssistantConfig(layers, hidden)
    centroids = read_int(raw, "num_centroids", 1, layers.vocab, default=2048)
    if layers.vocab % centroids:
        raise LoadError(
            f"num_centroids in config.json is {centroids}, which does not divide {layers.vocab},"
            " the size of the vocabulary"
        )
    used = read_int(raw, "centroid_intermediate_top_k", 1, centroids, default=32)
    return AssistantConfig(layers, hidden, centroids, used)


def target_layers(assistant: AssistantConfig, target: ModelConfig) -> list[int]:
    """Return for each layer the target's layer whose keys and values it reads: the last one of its
    kind, with or without a window, that has some of its own. Raises LoadError if they do not fit.
    """
    layers = assistant.layers
    if target.family != LAYERS:
        raise LoadError(f"it is for targets of the family {LAYERS}, this one is {target.family}")
    if target.layout == TRANSFORMERS:
        raise LoadError(
            "its target runs on transformers' own module, whose keys and values are not read: leave"
            " --backend out"
        )
    last: dict[bool, int] = {}
    for i, window in enumerate(target.windows):
        if target.kv_layer(i) == i:
            last[window is None] = i
    found = []
    for i, window in enumerate(layers.windows):
        source = last.get(window is None)
        if source is None or target.head_shape(source) != layers.head_shape(i):
            held = "none of its kind" if source is None else shown(target.head_shape(source))
            raise LoadError(
                f"layer {i} reads keys of {shown(layers.head_shape(i))} heads and numbers a head,"
                f" the target has {held}: use the assistant that was published for it"
            )
        found.append(source)
    return found
