"""Names of GGUF files: which file a tag means, what is no model, what belongs together."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import LoadError
from forerun.models.files import choose_gguf, first_shard, gguf_models, tag_of, title
from tests.little_gguf import little

MIXED = [
    "m-BF16.gguf",
    "m-IQ4_NL.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K", None),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("F16", None),
        ("Q4_NL", None),
        ("IQ4_NL", "m-IQ4_NL.gguf"),
        (".*", None),
        (None, "m-Q4_K_M.gguf"),
    ],
)
def test_a_tag_means_one_file(tag: str | None, file: str | None) -> None:
    """A tag is no prefix (Q4_K), no end (F16 of BF16) and no pattern; a projector is no model
    whatever its tag."""
    assert choose_gguf(MIXED, tag) == file


def test_without_a_tag_the_usual_ones_come_first() -> None:
    assert choose_gguf(["a-Q2_K.gguf", "b-Q8_0.gguf"], None) == "b-Q8_0.gguf"
    assert choose_gguf(["b-Q3_K_S.gguf", "a-Q2_K.gguf", "README.md"], None) == "a-Q2_K.gguf"
    assert choose_gguf(["mmproj-Q8_0.gguf", "config.json"], None) is None
    assert choose_gguf(["m-UD-Q4_K_XL.gguf", "z-Q8_0.gguf"], None) == "z-Q8_0.gguf"  # XL is not M


def test_a_folder_serves_where_no_file_has_the_tag() -> None:
    """llama.cpp would take the folder Q4_0-old for Q4_0, and with it a file of another format."""
    files = ["Q4_0-old/m-Q8_0.gguf", "m-Q4_0.gguf"]
    assert choose_gguf(files, "Q4_0") == "m-Q4_0.gguf"
    assert (
        choose_gguf(["BF16-full/m-00001-of-00002.gguf"], "BF16")
        == "BF16-full/m-00001-of-00002.gguf"
    )


def test_shards_count_once_and_sidecars_never() -> None:
    files = [
        "Q8_0/m-00002-of-00002.gguf",
        "Q8_0/m-00001-of-00002.gguf",
        "x-imatrix.gguf",
        "MTP-m.gguf",
        "m.gguf.part",
    ]
    assert gguf_models(files) == ["Q8_0/m-00001-of-00002.gguf"]


def test_a_tag_is_given_only_where_it_leads_back() -> None:
    assert {file: tag_of(file, MIXED) for file in gguf_models(MIXED)} == {
        "m-BF16.gguf": "BF16", "m-IQ4_NL.gguf": "IQ4_NL", "m-Q4_K_M.gguf": "Q4_K_M", "m-Q8_0.gguf": "Q8_0",
        "m-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    }  # fmt: skip
    assert tag_of("b-Q8_0.gguf", ["a-Q8_0.gguf", "b-Q8_0.gguf"]) is None
    assert tag_of("model.gguf", ["model.gguf"]) is None


def test_any_part_leads_to_the_first(tmp_path: Path) -> None:
    first = little(tmp_path / "m-00001-of-00003.gguf")
    third = little(tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(LoadError, match=r"m-00002-of-00003.gguf is not beside it"):
        first_shard(third)
    little(tmp_path / "m-00002-of-00003.gguf")
    assert first_shard(third) == first_shard(first) == first
    odd = little(tmp_path / "m-00001-of-00000.gguf")
    assert first_shard(odd) == odd


def test_what_a_model_is_called() -> None:
    """As the server names it: nothing of where it lies, and no ending, whatever dots are in a
    name."""
    for name, said in (
        ("/models/Qwen2.5-0.5B", "Qwen2.5-0.5B"), ("/models/a.b.Q4_K_M.gguf", "a.b.Q4_K_M"),
        ("x/big-Q8_0-00001-of-00003.gguf", "big-Q8_0"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), ("a.GGUF", "a"),
    ):  # fmt: skip
        assert title(name) == said
