"""Minimal model folders of Ollama and the Hub below a temporary home directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from forerun.models import local
from tests.tiny_gguf import tiny_gguf

IMAGE = "application/vnd.ollama.image."
HOST = "registry.example"
VARIABLES = [
    "OLLAMA_MODELS",
    "LLAMA_CACHE",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HOME",
    "XDG_CACHE_HOME",
]


def bare_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set HOME to a folder without any model."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(local, "SERVICE_FOLDERS", ())
    monkeypatch.setattr(local, "DEFAULT_PACKAGE", "no_such_package_is_here")
    return home


def ollama_model(
    home: Path, place: str, layer: str = "model", digest: str | None = None, **metadata: object
) -> Path:
    """Write a manifest at HOST/NAMESPACE/MODEL/TAG and its blob; return the blob's path."""
    root = home / ".ollama/models"
    hexadecimal = f"{abs(hash(place)):064x}"[-64:]
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": IMAGE + "license", "digest": f"sha256:{'0' * 64}", "size": 1},
        {"mediaType": IMAGE + layer, "digest": digest or f"sha256:{hexadecimal}", "size": 1},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return tiny_gguf(root / "blobs" / f"sha256-{hexadecimal}", **metadata)


def hub_file(
    home: Path, repository: str, file: str, commit: str = "c1", **metadata: object
) -> Path:
    """Write a GGUF file into a snapshot of the Hub's cache, as a link to a blob."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(commit)
    blob = tiny_gguf(folder / "blobs" / file.replace("/", "_"), **metadata)
    link = folder / "snapshots" / commit / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(blob)
    return link


def plain_model(directory: Path, *files: str) -> Path:
    """Write a directory with a config.json and these empty files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *files):
        (directory / name).write_text("{}")
    return directory
