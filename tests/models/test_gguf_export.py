"""Export of GGUF models as Hugging Face directories, from which transformers gives the same logits.

Protects: the inverse of the converter's changes for every family; names of ropes and biases; tokens
and templates; a drafter that is written with the tokenizer has the same vocabulary."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from forerun.cache.attention import Segment
from forerun.config import Config
from forerun.devices import as_tensor
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.load import check_vocabulary, make_runner
from forerun.models.config import load_config
from forerun.models.gguf.export import to_directory, write_tokenizer
from forerun.models.hub import default_model
from forerun.models.tokenizer import Tokenizer
from forerun.train.recipes.small_lm import load_module, prune
from tests import gguf_files, tiny
from tests.models.checks import ids, relative_error
from tests.models.test_gguf_families import HAS_EXPERTS

CASES = [(name, "Q8_0") for name in gguf_files.NAMES] + [
    ("llama", "q4_k_m"),
    ("qwen2", "F16"),
    ("qwen2", "q4_k_m"),
]
UNSUPPORTED = {
    name for name in gguf_files.FURTHER_NAMES if name[:6] in ("gemma3", "gemma4")
} | HAS_EXPERTS
UNSUPPORTED |= set(gguf_files.RECURRENT)
CASES += [(name, "Q8_0") for name in gguf_files.FURTHER_NAMES if name not in UNSUPPORTED]
MESSAGES = [{"role": "user", "content": "the end"}]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name, kinds", CASES)
def test_transformers_loads_the_exported_model(name: str, kinds: str, tmp_path: Path) -> None:
    """The logits are compared with those of the model that the file was written from."""
    written = gguf_files.written(name, kinds)
    text = torch.tensor([ids(80 if name == "phi3-longrope" else 24)])
    to_directory(written.path, tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(module(text).logits, written.model(text).logits) < 1e-5
    ours, theirs = load_config(written.path), load_config(tmp_path)
    assert (theirs.tied, theirs.end_ids, theirs.windows) == (ours.tied, ours.end_ids, ours.windows)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4", "qwen3_5"])
def test_unsupported_families_are_refused(name: str, tmp_path: Path) -> None:
    path = gguf_files.written(name, "Q8_0").path
    with pytest.raises(LoadError, match=f"training from GGUF files of the family {name}"):
        to_directory(path, tmp_path)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3-longrope", "gpt2", "glm4", "olmo2"])
def test_pruning_keeps_the_first_and_the_last_layer(name: str) -> None:
    """Each family gives a drafter of two layers."""
    written = gguf_files.written(name, "Q8_0")
    kept = prune(written.path, 2).state_dict()
    full = load_module(written.path).state_dict()
    last = load_config(written.path).layers - 1
    pairs = [(n, n.replace(f".{last}.", ".1.")) for n in full if f".{last}." in n]
    assert len(pairs) > 3 and all(torch.equal(full[n], kept[m]) for n, m in pairs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokenizers_and_templates_are_exported(kind: str, tmp_path: Path) -> None:
    path = gguf_files.written("llama", "Q8_0", tokenizer=kind).path
    write_tokenizer(path, tmp_path)
    ours, theirs = Tokenizer(path), Tokenizer(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the thing, and 12 others</s> in"
    assert ours.encode(text) == theirs.encode(text) == again(text)["input_ids"]
    assert (
        ours.chat(MESSAGES)
        == theirs.chat(MESSAGES)
        == again.apply_chat_template(MESSAGES)["input_ids"]
    )
    check_vocabulary(ours, tmp_path, tiny.VOCAB)
    check_vocabulary(theirs, path, tiny.VOCAB)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


@pytest.mark.default_model
@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
def test_export_of_the_default_model() -> None:
    """The hidden states of the first layer in transformers are those of the engine, except for the
    rounding of activations."""
    path = default_model()
    assert path is not None
    module = prune(path, 2)
    assert module.config.num_hidden_layers == 2 and module.config.eos_token_id == [0, 2, 4]
    tokens = Tokenizer(path).chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        theirs = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states[1][0]
    runner = make_runner(
        Config.of(kv_tokens=512, max_rows=1, context=256), path, torch.device("cpu")
    )
    runner.cache.pages.grow(0, len(tokens))
    ours = runner.forward([Segment.chain(0, tokens)], (1,)).features[1]
    assert relative_error(as_tensor(ours), theirs) < 0.03
