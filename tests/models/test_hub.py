"""Names of models: paths, the Hub (a fake one), and the naming rules of GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import LoadError
from forerun.models import hub
from forerun.models.files import choose_gguf, first_shard, gguf_models, tag_of, title
from forerun.models.hub import find_model
from tests.models.homes import plain_model
from tests.tiny_gguf import tiny_gguf


@pytest.fixture
def remote(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """Replace the Hub by repositories of file sizes, downloaded to `home/remote`."""
    files: dict[str, dict[str, int]] = {}
    monkeypatch.setattr(hub, "files_of_hub", lambda repository: files[repository])
    monkeypatch.setattr(
        hub,
        "download_file",
        lambda repository, file: tiny_gguf(home / "remote" / repository / file),
    )
    return files


def test_paths_of_files(home: Path) -> None:
    file = tiny_gguf(home / "m.gguf")
    assert find_model(str(file)) == find_model("~/m.gguf") == file
    blob = tiny_gguf(home / "sha256-00")  # blobs of Ollama have no file extension
    assert find_model(str(blob)) == blob
    (home / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(LoadError, match=r"is a file: give a .gguf file, or the directory"):
        find_model(str(home / "model.safetensors"))


def test_a_directory_with_a_single_gguf_file_is_that_file(home: Path) -> None:
    directory = plain_model(home / "plain", "model.safetensors")
    tiny_gguf(directory / "m.gguf")
    assert find_model(str(directory)) == directory, "weights beside config.json come first"
    alone = tiny_gguf(home / "alone/m-00001-of-00002.gguf")
    tiny_gguf(home / "alone/m-00002-of-00002.gguf")
    tiny_gguf(home / "alone/mmproj-m.gguf")
    plain_model(home / "alone")
    assert find_model(str(home / "alone")) == alone, "config.json without weights"
    another = tiny_gguf(home / "alone/other.gguf")
    with pytest.raises(LoadError, match=f"several models: give one of {alone}, {another}"):
        find_model(str(home / "alone"))
    (home / "empty").mkdir()
    assert find_model(str(home / "empty")) == home / "empty", "loading reports what is missing"


BAD = ["", "C:\\models\\m.gguf", "a/b:", "a/b:c:d", "a/b/c", "a//b", "~nobody/m", "\0", "m" * 5000]


@pytest.mark.parametrize("name", [*BAD, "/no/m", "m"])
def test_invalid_names_give_one_line(home: Path, name: str) -> None:
    with pytest.raises(LoadError, match=r"there is no directory or file .*: .*ollama:NAME"):
        find_model(name)


def test_all_shards_are_downloaded(
    remote: dict[str, dict[str, int]],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their total size is printed before the download."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    sizes = dict.fromkeys(parts, 700_000_000)
    remote["org/m"] = sizes | {"m-Q2_K.gguf": 5, "mmproj-Q8_0.gguf": 6, "README.md": 1}
    assert find_model("org/m:Q8_0") == home / "remote/org/m" / parts[0]
    assert len(list((home / "remote").rglob("*.gguf"))) == 2
    announced = f"forerun: downloading {parts[0]} of org/m from the Hub, 1.40 GB\n"
    assert capsys.readouterr().err == announced
    with pytest.raises(LoadError, match=r"no GGUF file for the tag Q4_K_M: it has Q8_0, Q2_K"):
        find_model("org/m:Q4_K_M")
    remote["org/none"] = {"model.safetensors": 3}
    with pytest.raises(LoadError, match=r"it has no GGUF files, give it without a tag"):
        find_model("org/none:Q8_0")
    remote["org/half"] = {parts[0]: 1}
    with pytest.raises(LoadError, match=r"has 2 shards, but .*00002-of-00002.gguf is missing"):
        find_model("org/half:Q8_0")


def test_a_repository_without_a_tag(
    remote: dict[str, dict[str, int]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safetensors files are used if there are any, else the preferred GGUF file."""
    directory = plain_model(home / "snapshot")
    monkeypatch.setattr(hub, "_download_snapshot", lambda repository, wanted: directory)
    remote["org/m"] = {"config.json": 1, "m-Q2_K.gguf": 5, "m-Q4_K_M.gguf": 6}
    assert find_model("org/m").name == "m-Q4_K_M.gguf"
    remote["org/m"] = {"config.json": 1, "pytorch_model.bin": 5}
    assert find_model("org/m") == directory
    plain_model(directory, "model.safetensors")
    remote["org/m"] = {"m-Q2_K.gguf": 5}
    assert find_model("org/m") == directory


def test_errors_of_the_hub_give_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with pytest.raises(LoadError, match=r"no directory a/b here, and .*: it is not in the local"):
        find_model("a/b")
    client = HfHubHTTPError.__mro__[1]
    for error, reason in (
        (client("no route\nto host"), "cannot be reached"),
        (OSError("disk full"), "disk full"),
        (HFValidationError("bad"), "no valid Hub id"),
    ):

        def failing(repository: str, error: Exception = error) -> dict[str, int]:
            raise error

        monkeypatch.setattr(hub, "files_of_hub", failing)
        words = f"no Q8_0 of org/m here, and it cannot be downloaded from the Hub: .*{reason}"
        with pytest.raises(LoadError, match=words):
            find_model("org/m:Q8_0")


# ---------------------------------------------------------------- names of GGUF files

LABELS = ("BF16", "IQ4_NL", "Q4_K_M", "Q8_0", "UD-Q4_K_XL")
MIXED = [*(f"m-{label}.gguf" for label in LABELS), "mmproj-F16.gguf"]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K", None),  # a prefix of a tag
        ("F16", None),  # a suffix of a tag
        (".*", None),  # a pattern
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("IQ4_NL", "m-IQ4_NL.gguf"),
        (None, "m-Q4_K_M.gguf"),
    ],
)
def test_a_tag_selects_one_file(tag: str | None, file: str | None) -> None:
    assert choose_gguf(MIXED, tag) == file


def test_the_preferred_file_is_chosen() -> None:
    assert choose_gguf(["a-Q2_K.gguf", "b-Q8_0.gguf"], None) == "b-Q8_0.gguf"
    assert choose_gguf(["b-Q3_K_S.gguf", "a-Q2_K.gguf", "README.md"], None) == "a-Q2_K.gguf"
    assert choose_gguf(["mmproj-Q8_0.gguf", "config.json"], None) is None
    assert choose_gguf(["Q4_0-old/m-Q8_0.gguf", "m-Q4_0.gguf"], "Q4_0") == "m-Q4_0.gguf"
    assert choose_gguf(["BF16-full/m.gguf"], "BF16") == "BF16-full/m.gguf"
    files = ["Q8_0/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf", "x-imatrix.gguf"]
    assert gguf_models([*files, "MTP-m.gguf", "m.gguf.part"]) == [files[1]]
    assert [tag_of(file, MIXED) for file in gguf_models(MIXED)] == list(LABELS)
    assert tag_of("b-Q8_0.gguf", ["a-Q8_0.gguf", "b-Q8_0.gguf"]) is None


def test_any_shard_leads_to_the_first(tmp_path: Path) -> None:
    first = tiny_gguf(tmp_path / "m-00001-of-00003.gguf")
    third = tiny_gguf(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(LoadError, match=r"m-00002-of-00003.gguf is not beside it"):
        first_shard(third)
    tiny_gguf(tmp_path / "m-00002-of-00003.gguf")
    assert first_shard(third) == first_shard(first) == first


def test_display_names() -> None:
    assert title("/models/a.b.Q4_K_M.gguf") == "a.b.Q4_K_M"
    assert title("x/big-Q8_0-00001-of-00003.gguf") == "big-Q8_0"
    assert title("Qwen/Qwen2.5-0.5B") == "Qwen2.5-0.5B"
