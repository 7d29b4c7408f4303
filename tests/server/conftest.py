"""One server with a tiny model for most tests, and a second model for tests that damage theirs.

Tests that need only the address of a server use `api` and run twice: with the server of this
process, and with a cluster of two replicas where Ray is installed (`pytest tests/server -k cluster`).
"""

from collections.abc import Iterator

import openai
import pytest

from forerun.llm import LLM
from tests import tiny
from tests.cluster.deployed import NEEDS_RAY, deployed
from tests.server.serving import Client, Serving, serving

CLUSTER_PLAN = """max_queue = 64
[[models]]
name = "tiny"
model = "{model}"
replicas = 2
threads = 1
context = 2048
kv_tokens = 8192
max_rows = 8
"""


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(tiny.repetitive(), context=2048, kv_tokens=8192, max_rows=8)


@pytest.fixture(scope="session")
def spare() -> LLM:
    """A model for servers that a test starts, damages and stops."""
    return LLM(tiny.repetitive(), context=2048, kv_tokens=2048, max_rows=2)


@pytest.fixture(scope="session")
def serve(llm: LLM) -> Iterator[Serving]:
    with serving(llm, max_queue=64) as running:
        yield running


@pytest.fixture(scope="session")
def server(serve: Serving) -> Serving:
    return serve


@pytest.fixture(scope="session", params=["serve", pytest.param("cluster", marks=NEEDS_RAY)])
def api(request: pytest.FixtureRequest) -> Iterator[Client]:
    if request.param == "serve":
        yield request.getfixturevalue("serve")
        return
    with deployed(CLUSTER_PLAN.format(model=tiny.repetitive())) as (_, http):
        yield Client(url=str(http.base_url).rstrip("/"), http=http)


@pytest.fixture(scope="session")
def client(api: Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="x", max_retries=0)
