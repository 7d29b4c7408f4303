"""A Hub that returns wrong sizes, types, names and lengths: reads are bounded and every error is
one line."""

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


def add_head(hub: FakeHub) -> None:
    hub.add(NAME, eagle_config(), eagle_shapes(), {"domains": "Code"}, README__md=b"# Head")


@pytest.mark.parametrize("honours_ranges", [True, False])
def test_only_the_headers_of_weights_are_read(
    hub: FakeHub, honours_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read is bounded even if the server ignores the range and sends the whole file."""
    hub.add(NAME, eagle_config(), eagle_shapes(lm_head__weight=(40_000, 1000)))
    hub.honours_ranges = honours_ranges
    sizes: list[int] = []
    read = catalog_hub.read_bytes

    def record_size(*args, **options):
        content = read(*args, **options)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(catalog_hub, "read_bytes", record_size)
    facts = facts_of(NAME)
    assert facts.shapes["lm_head.weight"] == (40_000, 1000) and facts.bytes > 80_000_000
    assert max(sizes) <= 1 << 17
    assert facts.kind.name == "eagle3 (speculators)"
    assert facts.repository.commit.startswith("0123")


def test_a_header_longer_than_the_first_request_is_read(hub: FakeHub) -> None:
    many = {f"layers.{i}.a_rather_long_name.weight": (1,) for i in range(3000)}
    for honours_ranges in (True, False):
        hub.add(NAME, eagle_config(), eagle_shapes(**many))
        hub.honours_ranges = honours_ranges
        assert len(facts_of(NAME).shapes) == 3000 + len(eagle_shapes())


def file(content: bytes) -> Callable[[FakeHub], None]:
    def apply(hub: FakeHub) -> None:
        hub.files[NAME]["model.safetensors"] = content

    return apply


def config(content: bytes) -> Callable[[FakeHub], None]:
    def apply(hub: FakeHub) -> None:
        hub.files[NAME]["config.json"] = content

    return apply


INVALID_RESPONSES: list[tuple[Callable[[FakeHub], None], str]] = [
    (file(b""), "safetensors file"),
    (file(struct.pack("<Q", 1 << 60) + b"{}"), "its header would have"),
    (file(struct.pack("<Q", 2) + b"[]"), "safetensors file"),
    (file(struct.pack("<Q", 40) + b'{"a": {"shape": [-1], "dtype": "F16"}}  '), "impossible sizes"),
    (file(struct.pack("<Q", 40) + b'{"a": {"shape": 5, "dtype": "F16"}}     '), "safetensors file"),
    (
        file(struct.pack("<Q", 400) + b'{"a": {"shape": [1' + b"0" * 379 + b"]}}"),
        "impossible sizes",
    ),
    (
        file(
            struct.pack("<Q", 60)
            + b'{"a": {"shape": [9,9,9,9,9,9,9,9,9], "dtype": "F16"}}'.ljust(60)
        ),
        "impossible sizes",
    ),
    (file(struct.pack("<Q", 20) + b"[" * 20), "safetensors file"),
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
    ("change", "text"), INVALID_RESPONSES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_invalid_responses_are_reported_in_one_line(
    hub: FakeHub, change: Callable[[FakeHub], None], text: str
) -> None:
    add_head(hub)
    change(hub)
    with pytest.raises(LoadError, match=text) as error:
        facts_of(NAME)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_paths_outside_the_repository_are_not_listed(hub: FakeHub) -> None:
    add_head(hub)
    listing = hub.describe(NAME)
    names = ["../../.bashrc", "/etc/passwd", "a/b.json", "..", ".env"]
    names += ["x\0.json", "a\\b.json", "-rf", "*.json"]
    listing["siblings"] += [{"rfilename": name, "size": 1} for name in names]
    hub.listings[NAME] = listing
    assert set(catalog_hub.look_up(NAME).files) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "name", ["org/none", "nothing", "../../x/y", "a/..", "a/b/c", "", "a b/c", "-a/b", "\x1b[2J/x"]
)
def test_invalid_repository_names_are_refused_in_one_line(hub: FakeHub, name: str) -> None:
    hub.add("org/x", target_config())
    with pytest.raises(LoadError) as error:
        catalog_hub.look_up(name)
    assert "\n" not in str(error.value) and str(error.value).isprintable()


def test_invalid_fields_of_a_listing_get_defaults(hub: FakeHub) -> None:
    add_head(hub)
    odd = {"sha": "../../x", "tags": {"a": 1}, "cardData": 5, "downloads": None}
    hub.listings[NAME] = hub.describe(NAME) | odd
    at = catalog_hub.look_up(NAME)
    assert (at.commit, at.tags, at.card, at.downloads) == ("main", (), {}, 0)
    json.dumps(at.files)
