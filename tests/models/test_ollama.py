"""Ollama's tree: the right blob for a name, and a reason by name where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.errors import LoadError
from forerun.models import ollama
from forerun.models.hub import find_model
from tests.models.homes import HOST, bare_home, ollama_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return bare_home(tmp_path, monkeypatch)


def test_names_as_ollama_writes_them(home: Path) -> None:
    """Defaults are the library and latest; another namespace and another host have to be named, in
    either case."""
    latest = ollama_model(home, f"{HOST}/library/smollm2/latest")
    tagged = ollama_model(home, f"{HOST}/library/qwen3/0.6b")
    own = ollama_model(home, f"{HOST}/someone/tuned/v1")
    pulled = ollama_model(home, "hf.co/Org/Repo-GGUF/Q4_K_M")
    assert find_model("ollama:smollm2") == find_model("ollama:smollm2:latest") == latest
    assert (
        find_model("ollama:library/smollm2")
        == find_model(f"ollama:{HOST}/library/smollm2")
        == latest
    )
    assert find_model("ollama:qwen3:0.6b") == find_model("ollama:Qwen3:0.6B") == tagged
    assert find_model("ollama:someone/tuned:v1") == own
    assert find_model("ollama:hf.co/org/repo-gguf:q4_k_m") == pulled
    names = [manifest.name for manifest in ollama.installed()[0]]
    assert names == ["hf.co/Org/Repo-GGUF:Q4_K_M", "qwen3:0.6b", "smollm2", "someone/tuned:v1"]
    assert [find_model(f"ollama:{name}") for name in names] == [pulled, tagged, latest, own]


def test_the_usual_host_comes_first(home: Path) -> None:
    other = ollama_model(home, "mirror.example/library/m/latest")
    assert find_model("ollama:m") == other
    assert (
        find_model("ollama:m")
        != ollama_model(home, f"{HOST}/library/m/latest")
        == find_model("ollama:m")
    )


def test_what_is_there_is_named_nearest_first(home: Path) -> None:
    for place in ("library/aya/latest", "library/qwen3/0.6b", "library/smollm2/latest"):
        ollama_model(home, f"{HOST}/{place}")
    with pytest.raises(LoadError, match=r"no model 'qwen3' here; it has ollama:qwen3:0.6b, "):
        find_model("ollama:qwen3")  # latest is not there
    with pytest.raises(LoadError, match=r"it has ollama:smollm2, "):
        find_model("ollama:smollm")
    for odd in ("", ":", "a/b/c/d/e", "../../library/aya", "\0"):
        with pytest.raises(LoadError, match=r"Ollama has no model"):
            find_model(f"ollama:{odd}")


@pytest.mark.parametrize(
    "digest", ["sha256:../../../secret", "sha256:" + "0" * 63, "md5:" + "0" * 64, 7]
)
def test_a_digest_is_no_path(home: Path, digest: object) -> None:
    """A manifest may come from anywhere: what it says must not lead out of the blobs."""
    (home / "secret").write_bytes(b"GGUF")
    ollama_model(home, f"{HOST}/library/m/latest", digest=digest)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"no valid digest"):
        find_model("ollama:m")


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("tensor", "MLX"),
        ("system", "cloud"),
        ("adapter", "no weights"),
        ("projector", "no weights"),
    ],
)
def test_only_a_model_layer_is_a_model(home: Path, layer: str, says: str) -> None:
    ollama_model(home, f"{HOST}/library/m/latest", layer=layer)
    with pytest.raises(LoadError, match=says):
        find_model("ollama:m")


def test_broken_trees_are_one_line(home: Path) -> None:
    blob = ollama_model(home, f"{HOST}/library/m/latest")
    blob.unlink()
    with pytest.raises(LoadError, match=f"there is no .*{blob.name}: ollama pull m"):
        find_model("ollama:m")
    manifest = home / f".ollama/models/manifests/{HOST}/library/m/latest"
    for text in ("not JSON", "[]", '{"layers": 3}', '{"layers": [3]}'):
        manifest.write_text(text)
        with pytest.raises(LoadError, match=r"manifest"):
            find_model("ollama:m")


def test_old_blobs_have_a_colon(home: Path) -> None:
    blob = ollama_model(home, f"{HOST}/library/m/latest")
    old = blob.rename(blob.with_name(blob.name.replace("-", ":")))
    assert find_model("ollama:m") == old


def test_the_variable_and_locked_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLLAMA_MODELS alone counts where it is set; a service's folder that may not be read is said
    to be so."""
    blob = ollama_model(home / "elsewhere", f"{HOST}/library/m/latest")
    with pytest.raises(LoadError, match=r"looked in"):
        find_model("ollama:m")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere/.ollama/models"))
    assert find_model("ollama:m") == blob

    def locked(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", locked)
    with pytest.raises(LoadError, match=r"permission denied"):
        find_model("ollama:m")
