"""Whatever the published schema allows, and what it does not: no request makes the server fail."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.server.serving import Front

POST = (
    *(
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    ),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
)
GET = (
    *(
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/ready",
        "/version",
        "/server_info",
        "/metrics",
    ),
    *("/api/tags", "/api/ps", "/api/version"),
)
OPERATIONS = [*(("POST", path) for path in POST), *(("GET", path) for path in GET)]
EXAMPLES = int(os.environ.get("FORERUN_FUZZ", "25"))  # of each operation, allowed and not allowed
LIMIT = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}  # texts are kept short: a long one shows no more


@pytest.fixture(scope="session")
def server(front: Front) -> Front:
    return front


@pytest.fixture(scope="module")
def schema(server: Front) -> Any:
    server.complete()  # a replica counts nothing before its first answer
    server.rest()
    server.logged.clear()
    import schemathesis  # takes seconds, and only who runs these tests should wait

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_tried(schema: Any) -> None:
    found = {(o.ok().method.upper(), o.ok().path) for o in schema.get_all_operations()}
    assert found == set(OPERATIONS)


def name_it(path: str, body: dict[str, Any]) -> None:
    """A model's name made up would end it there, and texts are kept short here too."""
    if path.startswith("/api/"):
        body["model"] = "tiny"
        if path in ("/api/chat", "/api/generate"):
            body["options"] = {"num_predict": 8}
    else:
        body.pop("model", None)


@pytest.mark.parametrize("mode", ["allowed", "not allowed"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_makes_it_fail(
    schema: Any, server: Front, method: str, path: str, mode: str
) -> None:
    from schemathesis.generation import GenerationMode

    allowed = mode == "allowed"
    if method == "GET" and not allowed:
        return  # they take nothing that could be wrong
    operation = schema[path][method]

    @seed(7)
    @settings(
        max_examples=EXAMPLES if method == "POST" else 2,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(
            generation_mode=GenerationMode.POSITIVE if allowed else GenerationMode.NEGATIVE
        )
    )
    def run(case: Any) -> None:
        limit = LIMIT.get(path)
        if limit and allowed and not 0 < (case.body.get(limit) or 99) <= 8:
            case.body |= dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), None) | {
                limit: 8
            }
        if allowed and isinstance(case.body, dict):
            name_it(path, case.body)
        response = case.call()
        assert response.status_code < 500, f"{case.as_curl_command()} -> {response.text[:300]}"
        if response.status_code >= 400:
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert isinstance(error, str) and error
            else:
                assert set(error) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]

    run()


def test_nothing_failed_and_all_is_given_back(schema: Any, server: Front) -> None:
    server.rest()
    assert server.complete()["choices"][0]["text"]
    assert not server.logged, [r.getMessage() for r in server.logged[:5]]
