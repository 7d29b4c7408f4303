"""A Hub with wrong sizes, types, names and lengths: reads are bounded and every error is one
line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest

from forerun.catalog import hub as catalog_hub
from forerun.catalog.facts import facts_of
from forerun.errors import LoadError
from tests.catalog.hub import FakeHub, eagle_config, eagle_shapes, target_config

NAME = "org/head"


def stocked(hub: FakeHub) -> None:
    hub.add(NAME, eagle_config(), eagle_shapes(), {"domains": "Code"}, README__md=b"# Head")


@pytest.mark.parametrize("honours", [True, False])
def test_headers_without_weights(
    hub: FakeHub, honours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server ignores the range and sends the whole file."""
    hub.add(NAME, eagle_config(), eagle_shapes(lm_head__weight=(40_000, 1000)))
    hub.honours_ranges = honours
    taken: list[int] = []
    read = catalog_hub.read_bytes

    def counted(*given, **named):
        content = read(*given, **named)
        taken.append(len(content))
        return content

    monkeypatch.setattr(catalog_hub, "read_bytes", counted)
    facts = facts_of(NAME)
    assert facts.shapes["lm_head.weight"] == (40_000, 1000) and facts.bytes > 80_000_000
    assert max(taken) <= 1 << 17
    assert facts.kind.name == "eagle3 (speculators)"
    assert facts.repository.commit.startswith("0123")


def test_a_header_longer_than_the_first_piece(hub: FakeHub) -> None:
    many = {f"layers.{i}.a_rather_long_name.weight": (1,) for i in range(3000)}
    for honours in (True, False):
        hub.add(NAME, eagle_config(), eagle_shapes(**many))
        hub.honours_ranges = honours
        assert len(facts_of(NAME).shapes) == 3000 + len(eagle_shapes())


def edit(content: bytes) -> Callable[[FakeHub], None]:
    def apply(hub: FakeHub) -> None:
        hub.files[NAME]["model.safetensors"] = content

    return apply


def config(content: bytes) -> Callable[[FakeHub], None]:
    def apply(hub: FakeHub) -> None:
        hub.files[NAME]["config.json"] = content

    return apply


WRONG_ANSWERS: list[tuple[Callable[[FakeHub], None], str]] = [
    (edit(b""), "safetensors file"),
    (edit(struct.pack("<Q", 1 << 60) + b"{}"), "its header would have"),
    (edit(struct.pack("<Q", 2) + b"[]"), "safetensors file"),
    (edit(struct.pack("<Q", 40) + b'{"a": {"shape": [-1], "dtype": "F16"}}  '), "impossible sizes"),
    (edit(struct.pack("<Q", 40) + b'{"a": {"shape": 5, "dtype": "F16"}}     '), "safetensors file"),
    (
        edit(struct.pack("<Q", 400) + b'{"a": {"shape": [1' + b"0" * 379 + b"]}}"),
        "impossible sizes",
    ),
    (
        edit(
            struct.pack("<Q", 60)
            + b'{"a": {"shape": [9,9,9,9,9,9,9,9,9], "dtype": "F16"}}'.ljust(60)
        ),
        "impossible sizes",
    ),
    (edit(struct.pack("<Q", 20) + b"[" * 20), "safetensors file"),
    (config(b"[]"), "does not hold an object"),
    (config(b"\xff\xfe"), "cannot be read"),
    (config(b"[" * 100_000), "cannot be read"),
    (config(b'{"a": "' + b"x" * (5 << 20) + b'"}'), "over 4 MB"),
    (lambda hub: hub.files[NAME].pop("config.json"), "has no config.json"),
    (lambda hub: hub.listings.update({NAME: []}), "makes no sense"),
    (
        lambda hub: hub.listings.update({NAME: {"id": NAME, "siblings": [{"size": 1}]}}),
        "makes no sense",
    ),
    (lambda hub: setattr(hub, "status", 500), "500"),
    (lambda hub: setattr(hub, "status", 401), "hf auth login"),
]


@pytest.mark.parametrize(
    ("change", "text"), WRONG_ANSWERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_wrong_answers_are_one_line(
    hub: FakeHub, change: Callable[[FakeHub], None], text: str
) -> None:
    stocked(hub)
    change(hub)
    with pytest.raises(LoadError, match=text) as error:
        facts_of(NAME)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_names_that_lead_elsewhere_are_not_listed(hub: FakeHub) -> None:
    stocked(hub)
    listing = hub.describe(NAME)
    names = ["../../.bashrc", "/etc/passwd", "a/b.json", "..", ".env"]
    names += ["x\0.json", "a\\b.json", "-rf", "*.json"]
    listing["siblings"] += [{"rfilename": name, "size": 1} for name in names]
    hub.listings[NAME] = listing
    assert set(catalog_hub.look_up(NAME).files) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "name", ["org/none", "nothing", "../../x/y", "a/..", "a/b/c", "", "a b/c", "-a/b", "\x1b[2J/x"]
)
def test_odd_names(hub: FakeHub, name: str) -> None:
    hub.add("org/x", target_config())
    with pytest.raises(LoadError) as error:
        catalog_hub.look_up(name)
    assert "\n" not in str(error.value) and str(error.value).isprintable()


def test_odd_numbers_in_a_listing(hub: FakeHub) -> None:
    stocked(hub)
    odd = {"sha": "../../x", "tags": {"a": 1}, "cardData": 5, "downloads": None}
    hub.listings[NAME] = hub.describe(NAME) | odd
    at = catalog_hub.look_up(NAME)
    assert (at.commit, at.tags, at.card, at.downloads) == ("main", (), {}, 0)
    json.dumps(at.files)
