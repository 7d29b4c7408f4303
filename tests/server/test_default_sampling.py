"""Default sampling is the same in all interfaces: the model authors' settings, else forerun's."""

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
    """A model whose authors recommend nothing, or two parameters."""
    monkeypatch.setattr(spare, "recommended", AUTHORS if request.param == "authors" else {})
    return spare


@pytest.fixture
def server(llm: LLM) -> Iterator[Serving]:
    with serving(llm, served_name="tiny") as running:
        yield running


def expected(llm: LLM, **given: Any) -> list[int]:
    """Return the tokens with every parameter written out."""
    values = {**DEFAULT, **llm.recommended, **given}
    params = SamplingParams(seed=SEED, max_tokens=TOKENS, **values)
    return llm.generate(PROMPT, params, draft="off")[0].token_ids


def test_library_uses_default_sampling(llm: LLM) -> None:
    assert llm.sampling == {**DEFAULT, **llm.recommended}
    defaults = SamplingParams(seed=SEED, max_tokens=TOKENS)
    assert llm.generate(PROMPT, defaults)[0].token_ids == expected(llm)
    stream = llm.stream(PROMPT, defaults)
    assert [token for event in stream for token in event.token_ids] == expected(llm)
    top_1 = SamplingParams(seed=SEED, max_tokens=TOKENS, top_k=1)
    assert llm.generate(PROMPT, top_1)[0].token_ids == expected(llm, temperature=0.0)
    greedy = SamplingParams(seed=SEED, max_tokens=TOKENS, temperature=0)
    assert (
        llm.generate(PROMPT, greedy)[0].token_ids == expected(llm, temperature=0.0) != expected(llm)
    )


@pytest.mark.parametrize("given", [{}, {"temperature": 1.5}, {"top_p": 1.0, "top_k": 0}])
def test_server_uses_default_sampling(server: Serving, llm: LLM, given: dict[str, Any]) -> None:
    tokens = expected(llm, **given)  # before the server's own thread uses the engine
    body = {"prompt": PROMPT, "seed": SEED, "max_tokens": TOKENS, "return_token_ids": True}
    (choice,) = server.complete(**body, **given)["choices"]
    assert choice["token_ids"] == tokens
    options = {"seed": SEED, "num_predict": TOKENS, **given}
    body = {"model": "tiny", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    assert server.answer("/api/generate", body)["response"] == choice["text"]


def test_server_reports_default_sampling(server: Serving, llm: LLM) -> None:
    body = {"model": "tiny", "input": "x", "max_output_tokens": 1}
    response = server.answer("/v1/responses", body)
    for name in ("temperature", "top_p"):
        assert response[name] == llm.sampling[name]
    assert server.answer("/v1/responses", body | {"temperature": 0})["temperature"] == 0
    info = server.http.get("/server_info").json()
    assert info["sampling"] == llm.recommended and info["default_sampling"] == DEFAULT
    shown = server.answer("/api/show", {"model": "tiny"})["parameters"].splitlines()
    for name in ("temperature", "top_k"):
        assert f"{name} {llm.sampling[name]}" in shown


def test_chat_shows_where_each_parameter_comes_from(llm: LLM) -> None:
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
def test_command_line_uses_generation_config(
    forerun, tmp_path: Path, settings: dict[str, Any] | None, differs: dict[str, Any]
) -> None:
    import shutil

    model = tmp_path / "tiny"
    shutil.copytree(tiny.repetitive(), model)
    if settings is not None:
        (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 2}))
    flags = ["--json", "--model", str(model), "--max-tokens", "2", "--kv-tokens", "2048"]
    assert json.loads(forerun("generate", "ab", *flags)[1])["sampling"] == {**DEFAULT, **differs}
    used = json.loads(forerun("generate", "ab", *flags, "-t", "0", "--top-k", "5")[1])["sampling"]
    assert used == {**DEFAULT, **differs, "temperature": 0.0, "top_k": 5}
