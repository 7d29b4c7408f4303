"""What clients put into messages, parts, calls, tools and items, besides the fields that are read:
tables as `fields` has one for whole requests. A conversation comes back as a client keeps it, with
whatever its library adds."""

from __future__ import annotations

from forerun.server.fields import Idle, Mapped, Only, Table

TEXT_ONLY = "this server takes and gives text only"
AS_IT_IS = "lay the conversation out yourself and send it to /v1/completions"
SEALED = "only the server that wrote it can read it"
THOUGHTS = Mapped(("reasoning_content", "thinking"))

SHARED: Table = {  # of every object of a conversation
    **dict.fromkeys(
        ("cache_control", "prompt_cache_breakpoint"), Idle("a cache cannot change the text here")
    ),
    **dict.fromkeys(("id", "object", "status", "phase"), Idle("templates have no place for it")),
    **dict.fromkeys(
        ("created", "created_at", "createdAt", "timestamp"), Idle("templates have no place for it")
    ),
    **dict.fromkeys(
        ("metadata", "additional_kwargs", "response_metadata"), Idle("it is the client's own")
    ),
    **dict.fromkeys(
        ("usage", "usage_metadata", "model", "extra_content"), Idle("it is about an earlier answer")
    ),
    **dict.fromkeys(
        ("provider_specific_fields", "provider_options", "providerOptions"),
        Idle("it is for others"),
    ),
    **dict.fromkeys(("provider_metadata", "providerMetadata"), Idle("it is for others")),
    **dict.fromkeys(("signature", "thought_signature", "encrypted_content"), Idle(SEALED)),
}
MESSAGE: Table = SHARED | {
    "reasoning": THOUGHTS,
    "thinking": THOUGHTS,
    "tool_name": Mapped(("name",)),
    **dict.fromkeys(
        ("reasoning_details", "thinking_blocks"), Idle("thoughts are read from reasoning_content")
    ),
    **dict.fromkeys(("annotations", "citations"), Idle("sources are no part of the text")),
    "parsed": Idle("it is read from the content"),
    **dict.fromkeys(("audio", "images", "videos", "audios"), Only(([],), TEXT_ONLY)),
    "function_call": Only((), "use tool_calls"),
    **dict.fromkeys(("prefix", "partial"), Only((False,), AS_IT_IS)),
}
PART: Table = SHARED | {
    **dict.fromkeys(("annotations", "citations"), Idle("sources are no part of the text")),
    "logprobs": Idle("it is about an earlier answer"),
    "parsed": Idle("it is read from the text"),
}
THOUGHT: Table = SHARED | {
    "text": Mapped(("thinking",)),
    "reasoning": Mapped(("thinking",)),
    "data": Idle(SEALED),
}
CALL: Table = SHARED | {
    "index": Idle("calls are in order"),
    "parsed_arguments": Idle("it is read from the arguments"),
    "description": Idle("a call needs none"),
    "custom": Only((), "give a call of type function"),
}
TOOL: Table = SHARED | {
    "defer_loading": Only((False,), "every tool is told to the model from the beginning"),
    "allowed_callers": Only((["direct"],), "the model calls tools, and no program does"),
    **dict.fromkeys(
        ("async", "async_", "eager_input_streaming"), Idle("calls are handed out as they come")
    ),
    "output_schema": Idle("what tools say is not checked"),
    "input_schema": Mapped(("parameters",), schema={"type": "object"}),
}
NESTED_TOOL: Table = SHARED | dict.fromkeys(
    ("name", "description", "parameters", "strict", "input_schema"),
    Only((), 'put it into "function"'),
)
FLAT_TOOL: Table = TOOL | {"function": Only((), "put what is in it beside the type")}
ITEM: Table = {name: row for name, row in (MESSAGE | CALL).items() if name != "tool_name"} | {
    **dict.fromkeys(
        ("caller", "namespace", "async", "async_", "created_by"), Idle("a call needs none")
    ),
    "tool_calls": Only(([],), "give items of type function_call"),
    "tool_call_id": Only((), "give an item of type function_call_output, with its call_id"),
}
