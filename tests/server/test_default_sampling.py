"""Every door samples alike where a request says nothing: as the model's authors set it, else by
forerun's default.

The command line was greedy then, the server drew at temperature 1 from every token, and the library
was greedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cli.conversation import Commands, Conversation, Parameters
from forerun.sampling.params import DEFAULT
from tests import tiny
from tests.cli.test_main import forerun  # noqa: F401
from tests.server.serving import Serving, serving

AUTHORS = {"temperature": 0.6, "top_k": 3}
PROMPT, TOKENS, SEED = "def add(a, b):", 40, 7


@pytest.fixture(params=["nothing", "authors"])
def llm(request: pytest.FixtureRequest, spare: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model whose authors set nothing, or two parameters."""
    monkeypatch.setattr(spare, "recommended", AUTHORS if request.param == "authors" else {})
    return spare


@pytest.fixture
def server(llm: LLM) -> Iterator[Serving]:
    with serving(llm, served_name="tiny") as running:
        yield running


def expected(llm: LLM, **given: Any) -> list[int]:
    """What is said with every parameter written out."""
    values = {**DEFAULT, **llm.recommended, **given}
    params = SamplingParams(seed=SEED, max_tokens=TOKENS, **values)
    return llm.generate(PROMPT, params, draft="off")[0].token_ids


def test_the_library_takes_them_where_nothing_is_said(llm: LLM) -> None:
    assert llm.sampling == {**DEFAULT, **llm.recommended}
    bare = SamplingParams(seed=SEED, max_tokens=TOKENS)
    assert llm.generate(PROMPT, bare)[0].token_ids == expected(llm)
    stream = llm.stream(PROMPT, bare)
    assert [token for event in stream for token in event.token_ids] == expected(llm)
    one = SamplingParams(seed=SEED, max_tokens=TOKENS, top_k=1)
    assert llm.generate(PROMPT, one)[0].token_ids == expected(llm, temperature=0.0)
    cold = SamplingParams(seed=SEED, max_tokens=TOKENS, temperature=0)
    assert (
        llm.generate(PROMPT, cold)[0].token_ids == expected(llm, temperature=0.0) != expected(llm)
    )


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 1.5}, {"top_p": 1.0, "top_k": 0}, {"min_p": 0.0}]
)
def test_so_does_the_server(server: Serving, llm: LLM, given: dict[str, Any]) -> None:
    wanted = expected(llm, **given)  # before the server's own thread uses the engine
    said = server.complete(
        prompt=PROMPT, seed=SEED, max_tokens=TOKENS, return_token_ids=True, **given
    )
    assert said["choices"][0]["token_ids"] == wanted
    options = {"seed": SEED, "num_predict": TOKENS, **given}
    body = {"model": "tiny", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    assert server.answer("/api/generate", body)["response"] == said["choices"][0]["text"]


def test_what_the_server_says_of_them(server: Serving, llm: LLM) -> None:
    said = server.answer("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 1})
    assert (said["temperature"], said["top_p"]) == (
        llm.sampling["temperature"],
        llm.sampling["top_p"],
    )
    said = server.answer(
        "/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 1, "temperature": 0}
    )
    assert said["temperature"] == 0
    info = server.http.get("/server_info").json()
    assert info["sampling"] == llm.recommended and info["default_sampling"] == DEFAULT
    shown = server.answer("/api/show", {"model": "tiny"})["parameters"].splitlines()
    assert (
        f"temperature {llm.sampling['temperature']}" in shown
        and f"top_k {llm.sampling['top_k']}" in shown
    )


def test_a_conversation_says_where_each_comes_from(llm: LLM) -> None:
    parameters = Parameters({}, llm.recommended)
    assert {name: getattr(parameters.params, name) for name in DEFAULT} == llm.sampling
    shown = Commands(Conversation(llm), parameters).run("/show")
    assert "0.95 (forerun's default)" in shown
    assert ("3 (model's authors)" if llm.recommended else "40 (forerun's default)") in shown
    parameters.set("temperature", "0")
    assert parameters.params.greedy


@pytest.mark.parametrize(
    ("settings", "differs"),
    [
        (None, {}),
        ({"do_sample": False, "temperature": 0.2}, {}),
        ({"do_sample": True, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"do_sample": True, "temperature": 0.3, "min_p": 0.2}, {"temperature": 0.3, "min_p": 0.2}),
    ],
)
def test_the_command_line(
    forerun, tmp_path: Path, settings: dict[str, Any] | None, differs: dict[str, Any]
) -> None:
    import shutil

    model = tmp_path / "tiny"
    shutil.copytree(tiny.spoken(), model)
    if settings is not None:
        (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 2}))
    flags = ["--json", "--model", str(model), "--max-tokens", "2", "--kv-tokens", "2048"]
    assert json.loads(forerun("generate", "ab", *flags)[1])["sampling"] == {**DEFAULT, **differs}
    used = json.loads(forerun("generate", "ab", *flags, "-t", "0", "--top-k", "5")[1])["sampling"]
    assert used == {**DEFAULT, **differs, "temperature": 0.0, "top_k": 5}
