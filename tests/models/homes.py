"""The trees in which other programs keep models, as small as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.little_gguf import little

IMAGE = "application/vnd.ollama.image."
HOST = "registry.example"


def bare_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any model, and nothing that says where else to look."""
    from huggingface_hub import constants

    from forerun.models import hub, ollama

    for name in (
        "OLLAMA_MODELS",
        "LLAMA_CACHE",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HOME",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(ollama, "SERVICES", ())
    monkeypatch.setattr(hub, "DEFAULT_PACKAGE", "no_such_package_is_here")
    return home


def ollama_model(
    home: Path, place: str, layer: str = "model", digest: str | None = None, **metadata: object
) -> Path:
    """A manifest at HOST/NAMESPACE/MODEL/TAG and its blob, whose path is returned."""
    root = home / ".ollama/models"
    hexadecimal = f"{abs(hash(place)):064x}"[-64:]
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": IMAGE + "license", "digest": f"sha256:{'0' * 64}", "size": 1},
        {"mediaType": IMAGE + layer, "digest": digest or f"sha256:{hexadecimal}", "size": 1},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return little(root / "blobs" / f"sha256-{hexadecimal}", **metadata)


def hub_file(
    home: Path, repository: str, file: str, commit: str = "c1", **metadata: object
) -> Path:
    """A GGUF file in a snapshot of the Hub's cache, as a link to a blob."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(commit)
    blob = little(folder / "blobs" / file.replace("/", "_"), **metadata)
    link = folder / "snapshots" / commit / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(blob)
    return link
