"""Compare drafted logits with those of the families' own code: Medusa, MLP speculators of IBM and
Arctic.

python scripts/published_heads.py SOURCES

SOURCES holds checkouts or unpacked wheels, whichever there are: Medusa (`pip download --no-deps
medusa-llm`), fms-extras (foundation-model-stack/fms-extras, which needs ibm-fms beside it) and
ArcticTraining (snowflakedb/ArcticTraining). Their modules are filled with random numbers, saved as
they save them, read by forerun, and asked for the same states and tokens. Fails where logits differ
by more than 1e-4. Their code is run: read it first."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import LLM
from forerun.draft.kinds import kind_of
from forerun.draft.medusa import MedusaStyleHeads
from forerun.draft.proposer import TargetView, view_of
from forerun.draft.registry import MEDUSA_LOADERS

HIDDEN, VOCAB, LEVELS_AHEAD, POSITIONS, MOST = 32, 64, 3, 6, 1e-4
BASE = LlamaConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, attn_implementation="eager",
)  # fmt: skip
Case = tuple[str, dict[str, Any], dict[str, Tensor], str, Callable[[Tensor, Tensor], Any]]


def load(name: str, path: Path, **stubs: Any) -> Any:
    """A module of theirs by its file; `stubs` are modules that it imports and does not need
    here."""
    for stub, content in stubs.items():
        sys.modules[stub.replace("__", ".")] = content
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in module.parameters():
            value.normal_(0.0, 0.3).add_(float(value.ndim == 1))
    return module.eval()


def medusa(sources: Path, base: LlamaForCausalLM) -> Iterator[Case]:
    named = {
        f"medusa__model__{name}": MagicMock() for name in ("modeling_llama_kv", "utils", "kv_cache")
    }
    theirs = load(
        "medusa.model.medusa_model", sources / "Medusa/medusa/model/medusa_model.py", **named
    )
    theirs.AutoTokenizer = MagicMock()
    for layers in (1, 2):
        heads = filled(theirs.MedusaModel(base, LEVELS_AHEAD, layers).medusa_head)
        raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "base"}

        def say(states: Tensor, tokens: Tensor, heads: Any = heads) -> Any:
            return [head(states) for head in heads]

        yield f"Medusa, {layers} layers", raw, heads.state_dict(), "medusa_lm_head.pt", say


def speculators(sources: Path) -> Iterator[Case]:
    sys.path.insert(0, str(sources / "ibm-fms"))
    from fms.utils import serialization  # type: ignore[import-not-found]

    serialization.register_adapter = MagicMock()  # of an older fms, and not needed here
    common = {"n_predict": LEVELS_AHEAD, "vocab_size": VOCAB, "model_type": "mlp_speculator"}
    ibm = {
        **common,
        "emb_dim": HIDDEN,
        "inner_dim": 24,
        "architectures": ["MLPSpeculatorPreTrainedModel"],
    }
    extras = load("fms_speculator", sources / "fms-extras/fms_extras/models/speculator.py")
    folder = sources / "ArcticTraining/projects/mlp_speculator/mlp_speculator"
    mlp = load("arctic_mlp", folder / "speculator.py")
    models: list[tuple[str, dict[str, Any], Any, str]] = []
    for tied in (False, True):
        raw = ibm | {"tie_weights": tied, "scale_input": tied}
        own = extras.MLPSpeculator(
            HIDDEN, 24, VOCAB, LEVELS_AHEAD, tie_weights=tied, scale_input=tied
        )
        models.append((f"IBM, tied {tied}", raw, own, "speculator."))
        raw = raw | {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}
        models.append((f"Arctic, tied {tied}", raw, mlp.MLPSpeculator(SimpleNamespace(**raw)), ""))
    for name, raw, own, prefix in models:
        tensors = {f"{prefix}{k}": tensor for k, tensor in filled(own).state_dict().items()}

        def say(states: Tensor, tokens: Tensor, own: Any = own) -> Any:
            return own(states[None], tokens[None])[:, 0]

        yield name, raw, tensors, "pytorch_model.bin", say


def drafted(heads: MedusaStyleHeads, states: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return the logits of forerun's heads: level i behind the tokens from i on."""
    logits_by_level, carried = [], heads.initial(states)
    for level in range(heads.levels):
        logits, carried = heads.step(level, carried, tokens[level : level + len(states)])
        logits_by_level.append(logits)
    return logits_by_level


@torch.inference_mode()
def compare(case: Case, target: TargetView) -> float:
    """The largest difference of any logit."""
    _, raw, tensors, file, say = case
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(raw))
        torch.save(tensors, directory / file)
        heads = MEDUSA_LOADERS[kind_of(directory)](directory)
    heads.attach(target)
    states, tokens = (
        torch.randn(POSITIONS, HIDDEN),
        torch.randint(VOCAB, (POSITIONS + LEVELS_AHEAD,)),
    )
    pairs = zip(say(states, tokens), drafted(heads, states, tokens), strict=True)
    return max(float((theirs - ours).abs().max()) for theirs, ours in pairs)


def main(sources: Path) -> int:
    """Compare all that is there. Returns the exit status."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(BASE).eval()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        target = view_of(LLM(folder, draft="off", kernels="torch", kv_tokens=256).decoder)
        cases = [*medusa(sources, base)] if (sources / "Medusa").is_dir() else []
        cases += [*speculators(sources)] if (sources / "fms-extras").is_dir() else []
        for case in cases:
            apart = compare(case, target)
            worst = max(worst, apart)
            print(f"{case[0]}: {apart:.1e}")
    return int(not cases or not worst <= MOST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, help="checkouts or unpacked wheels")
    sys.exit(main(parser.parse_args().sources))
