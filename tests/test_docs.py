"""The documentation stays correct: its links have targets, and its commands and names exist."""

import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import forerun
from forerun.cli.main import command_line
from forerun.draft_spec import KINDS
from forerun.models.mixed_families import FAMILIES
from forerun.sampling.params import DEFAULT_MAX_TOKENS
from forerun.server.openai import DEFAULT_COMPLETION_TOKENS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    ROOT / "benchmarks" / "LOG.md",
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
GUIDES = PAGES[:-1]  # the changelog also names removed commands
GENERATED = {"cli.md", "changelog.md"}  # written when the site is built
NOT_A_SHELL = {"python", "toml", "json", "text"}
ENDS = {"|", ">", ">>", "&&", ";"}


def tokens(page: Path) -> list[Token]:
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [token for block in parsed for token in (block, *(block.children or []))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings."""
    parsed = tokens(page)
    headings = [after.content for at, after in pairwise(parsed) if at.type == "heading_open"]
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def links(page: Path) -> list[str]:
    found = [token.attrGet("href") or token.attrGet("src") for token in tokens(page)]
    return [str(link) for link in found if link and not re.match(r"https?:", str(link))]


def lines(page: Path) -> list[str]:
    """Return the lines of shell blocks, continued lines joined, and inline code."""
    parsed = tokens(page)
    blocks = [
        token.content for token in parsed if token.type == "fence" and token.info not in NOT_A_SHELL
    ]
    written = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return written + [token.content for token in parsed if token.type == "code_inline"]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after each `forerun` in a command."""
    for line in lines(page):
        if not re.search(r"(^|[ /])forerun( |$)", line):
            continue
        words = shlex.split(re.sub(r"[\[\]]", "", line), comments=True)
        for i, word in enumerate(words):
            if (word == "forerun" or word.endswith("/forerun")) and words[i - 1 : i] != ["from"]:
                rest = words[i + 1 :]
                end = next((j for j, other in enumerate(rest) if other in ENDS), len(rest))
                yield rest[:end]


def unknown(words: list[str]) -> str:
    """Return the first verb or flag of a command that does not exist, or an empty string."""
    command: Any = command_line()
    rest = list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[0]
        command = command.commands[rest.pop(0)]
    known = {"--help", "-h", "--install-completion", "--show-completion"}
    for parameter in command.params:
        known.update(parameter.opts, parameter.secondary_opts)
    flags = [word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return next((flag for flag in flags if flag not in known), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_a_target(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_verbs_and_flags_exist(page: Path) -> None:
    for words in commands(page):
        assert not unknown(words), (
            f"{page.name}: forerun {shlex.join(words)}: there is no {unknown(words)}"
        )


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_named_test_files_exist(page: Path) -> None:
    for name in re.findall(r"\btests/[\w/]+\.py", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_commands_and_their_mistakes_are_found() -> None:
    found = [words for page in GUIDES for words in commands(page)]
    assert ["generate", "What is the capital of France?"] in found
    assert len(found) > 80
    assert unknown(["generte", "Hello"]) == "generte"
    assert unknown(["bench", "decode", "--dephts", "4"]) == "--dephts"
    assert unknown(["generate", "-x", "Hello"]) == "-x"


def test_every_page_is_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [page for entry in site["nav"] for page in entry.values()]
    assert sorted(listed) == sorted({page.name for page in DOCS.glob("*.md")} | GENERATED)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pages_begin_with_their_purpose(page: Path) -> None:
    assert page.read_text(encoding="utf-8").split("\n\n")[1].startswith("On this page you can ")


@pytest.mark.parametrize(
    ("page", "names"),
    [("drafters.md", KINDS), ("models.md", FAMILIES)],
    ids=["drafters", "families"],
)
def test_every_drafter_and_family_has_a_row(page: str, names: Iterable[str]) -> None:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    table = "\n".join(line for line in lines if line[:1] == "|")
    assert not [name for name in names if not re.search(rf"`{name}[`:]", table)]


def test_the_names_in_the_tour_exist() -> None:
    """Each `file: Name` is below forerun/ or the root, and the file defines the name."""
    named = [
        re.fullmatch(r"([\w/]+(?:/|\.\w+))(?:: (\w+)(?:\.(\w+))?)?", line)
        for line in lines(DOCS / "tour.md")
    ]
    places = [match for match in named if match]
    assert len(places) > 40
    for place, *names in (match.groups() for match in places):
        path = next((p for p in (ROOT / "forerun" / place, ROOT / place) if p.exists()), None)
        assert path, place
        for name in filter(None, names):
            text = path.read_text(encoding="utf-8")
            assert re.search(rf"^ *(?:def|class) {name}\b", text, re.M), (place, name)


def test_the_reference_has_every_verb_and_flag() -> None:
    spec = importlib.util.spec_from_file_location(
        "cli_reference", ROOT / "scripts" / "cli_reference.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.reference()
    assert "[dim]" not in page and "\\[" not in page
    assert (
        "-n, --max-tokens &lt;int&gt;</code></dt><dd>Maximum number of tokens to generate; fewer if the context is full. By default 512. (also --n-predict)</dd>"
        in page
    )
    for path, command in verbs(command_line(), "forerun"):
        section = re.split(r"^#+ ", page.split(f"# {path}\n")[1], flags=re.MULTILINE)[0]
        for parameter in command.params:
            is_argument = parameter.param_type_name == "argument"
            names = [parameter.metavar or ""] if is_argument else parameter.opts
            assert all(name in section for name in names), f"{path}: {names}"


def test_the_reference_of_the_library_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    described = re.findall(r"^::: ([\w.]+)$", page, flags=re.MULTILINE)
    assert {f"forerun.{name}" for name in forerun.__all__} <= set(described)
    for path in described:
        module, name = path.rsplit(".", 1)
        assert getattr(importlib.import_module(module), name).__doc__, path


@pytest.mark.parametrize("name", forerun.__all__)
def test_documented_arguments_exist(name: str) -> None:
    """`make docs` refuses other names."""
    value = getattr(forerun, name)
    methods = [m for n, m in vars(value).items() if not n.startswith("_") and inspect.isroutine(m)]
    for each in (value, *(getattr(method, "__func__", method) for method in methods)):
        found = re.search(r"^Args:\n((?: +.*\n?|\n)*)", inspect.getdoc(each) or "", re.MULTILINE)
        if found:
            named = re.findall(r"^ {4}(\S.*?): ", found[1], flags=re.MULTILINE)
            assert named and set(named) <= set(inspect.signature(each).parameters), each


def test_every_help_ends_with_examples_that_exist() -> None:
    for path, command in [("forerun", command_line()), *verbs(command_line(), "forerun")]:
        title, *examples = re.sub(r"\[/?dim\]", "", command.epilog or "").split("\n\n")
        assert title == "Examples:" and examples, path
        assert all(f"{path} " in f"{example} " for example in examples), path
        for example in examples:
            words = shlex.split(example.split(" | ")[-1])[1:]
            if words[:1] != ["COMMAND"]:
                assert not unknown(words), f"{path}: {example}: there is no {unknown(words)}"


def test_the_default_length_is_the_same_everywhere() -> None:
    """It is a constant in the code, and a number on pages and in the form of the playground."""
    page = (ROOT / "forerun/server/playground/index.html").read_text(encoding="utf-8")
    (field,) = re.findall(r'name="max_tokens"[^>]*value="(\d+)"', page)
    assert int(field) == DEFAULT_MAX_TOKENS
    server = (DOCS / "server.md").read_text(encoding="utf-8")
    assert f"{DEFAULT_MAX_TOKENS} tokens" in server
    assert f"{DEFAULT_COMPLETION_TOKENS} tokens" in server
    generate = (DOCS / "generate.md").read_text(encoding="utf-8")
    assert re.search(rf"--max-tokens.*\b{DEFAULT_MAX_TOKENS}\b", generate)


def verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")


@pytest.mark.parametrize("image", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_images_are_small_and_animations_can_be_turned_off(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert len(text) < 200_000
    assert "prefers-reduced-motion" in text or "animation" not in text
