"""What bad requests cost: one is answered with one error, and to find it must not take the server's
memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from forerun.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
)

MANY = 10_000
COMPLETION, CHAT = {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (CompletionRequest, {"prompt": [None] * MANY}),
        (CompletionRequest, {"prompt": [[None] * MANY]}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, COMPLETION | {"stop_token_ids": ["a"] * MANY}),
        (CompletionRequest, COMPLETION | {"logit_bias": {str(i): None for i in range(MANY)}}),
        (CompletionRequest, COMPLETION | {f"field{i}": 0 for i in range(MANY)}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, CHAT | {"tools": [None] * 128}),
        (ResponsesRequest, {"input": [{"type": 3}] * MANY}),
        (DetokenizeRequest, {"tokens": [None] * MANY}),
    ],
)
def test_errors_do_not_grow_with_the_request(kind: type[Body], value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(value)
    assert error.value.error_count() < 10
