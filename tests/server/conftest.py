"""One server with a tiny model for most tests, and a second model for those that mistreat theirs."""

from collections.abc import Iterator

import openai
import pytest

from forerun.llm import LLM
from tests import tiny
from tests.server.serving import Serving, serving


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(tiny.spoken(), context=2048, kv_tokens=8192, max_rows=8)


@pytest.fixture(scope="session")
def spare() -> LLM:
    """A model for servers that are started, hurt and stopped."""
    return LLM(tiny.spoken(), context=2048, kv_tokens=2048, max_rows=2)


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[Serving]:
    with serving(llm, max_queue=64) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
