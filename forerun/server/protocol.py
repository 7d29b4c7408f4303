"""What clients may send: OpenAI's fields, the extensions people expect, and ours. Unknown fields
are refused.

Types are strict ("5" is no number; `numbers` has the one reading of those that are). What OpenAI's
clients send and a local server has no use for is accepted and ignored; it is listed in `Ignored`.
What other servers and their clients know is in `fields`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from forerun.errors import shorten
from forerun.server import fields, message_fields
from forerun.server.errors import ApiError
from forerun.server.numbers import Depth, Length, List, Number, TokenIds, TopK, TopLogprobs, Whole

MOST_FIELDS = 100  # of one object whose fields are known

Stop = Annotated[str, Field(max_length=256)]
Stops = Stop | Annotated[List[Stop], Field(max_length=16)]
MOST_MESSAGES = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
Metadata = Annotated[dict[str, Any], Field(max_length=64)]
Salt = Annotated[
    str, Field(max_length=256)
]  # requests with the same one share a memory, within a tenant


def _biases(value: Any) -> Any:
    """As in lists, the first that is wrong is enough."""
    if isinstance(value, dict):
        for token, bias in value.items():
            if not isinstance(bias, (int, float)) or isinstance(bias, bool):
                raise PydanticCustomError(
                    "bias", "the bias of token {token} must be a number", {"token": token[:20]}
                )
    return value


class Strict(BaseModel):
    """An object whose fields are all known: ours, and those of other servers and clients, which are
    in `others`."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=fields.describe)
    others: ClassVar[fields.Table] = {}

    @model_validator(mode="before")
    @classmethod
    def settled(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_FIELDS:
            raise PydanticCustomError(
                "fields", "this object has {count} fields", {"count": len(value)}
            )
        known = _names(cls)
        if value.keys() <= known:
            return _without_nulls(value, known)
        try:
            ours, ignored = fields.settle(value, known, cls.others)
        except ApiError as error:
            if issubclass(cls, Body):
                raise
            raise PydanticCustomError(
                "field", "{message}", {"message": str(error)}
            ) from None  # it is told where
        fields.leave_out(ignored)
        return _without_nulls(ours, known)


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields, as they are sent."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _without_nulls(value: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """An object without those of its known fields that are null: null means absent in every
    field."""
    if None not in value.values():
        return value
    return {name: item for name, item in value.items() if item is not None or name not in known}


class Body(Strict):
    """A whole request, of a value that `limits` has parsed: it is not too large, and can be written
    as JSON again."""

    _left_out: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def collected(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        with fields.left_out() as names:
            request = handler(value)
        request._left_out = tuple(dict.fromkeys(names))
        return request

    @property
    def left_out(self) -> tuple[str, ...]:
        """Fields that were sent and have no effect on the text, those of objects within the request
        too."""
        return self._left_out


class Ignored(Body):
    """Fields of hosted services: understood, and without effect here."""

    others = fields.TABLE

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Speculative(Strict):
    """How one request drafts."""

    draft: str | None = None
    depth: Depth | None = None
    rule: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


NAMED_SCHEMA = ("name", "description", "schema", "strict")
FORM_VALUES = ("json_schema", "regex", "grammar", "choice")  # each belongs to the type of its name
FORM = {"type", *NAMED_SCHEMA, *FORM_VALUES}


class ResponseFormat(Strict):
    """text, json_object, json_schema, and vLLM's regex and grammar (Lark)."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: List[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def in_one_shape(cls, value: Any) -> Any:
        return _one_shape(value)


def _one_shape(value: Any) -> Any:
    """A form as OpenAI's chats write it. llama.cpp and the Responses API have a schema beside the
    type."""
    if not isinstance(value, dict):
        raise _odd('give an object, such as {"type": "json_object"}')
    given = {name: item for name, item in value.items() if item is not None or name not in FORM}
    if given.get("type") in ("json_object", "json_schema") and "schema" in given:
        if "json_schema" in given:
            raise _odd("the schema is there twice, as schema and as json_schema: give one")
        named = {name: given.pop(name) for name in NAMED_SCHEMA if name in given}
        given |= {"type": "json_schema", "json_schema": named}
    kind = given.get("type")
    for name in FORM_VALUES:
        if name in given and isinstance(kind, str) and kind != name:
            raise _odd(f"type {kind[:20]!r} has no {name}: give type {name!r}, or leave {name} out")
    inner = given.get("json_schema")
    if isinstance(inner, dict) and "schema" not in inner and not inner.keys() <= set(NAMED_SCHEMA):
        raise _odd(
            'json_schema must be {"name": ..., "schema": ...}: put the schema into its schema'
        )
    return given


def _odd(advice: str) -> PydanticCustomError:
    return PydanticCustomError("form", "{advice}", {"advice": advice})


class Sampled(Ignored):
    """What everything that generates has in common."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop: Stops | None = None
    seed: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stream: bool | None = None
    response_format: ResponseFormat | None = None
    top_k: TopK | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Whole | None = None
    speculative: bool | Speculative | None = None
    cache_salt: Salt | None = None
    parallel_tool_calls: bool | None = None  # false: an answer has one call at most


class Generation(Sampled):
    """What completions and chats have in common."""

    n: Whole | None = None
    logit_bias: Annotated[dict[str, Number], BeforeValidator(_biases)] | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    documents: Annotated[List[str], Field(max_length=64)] | None = None
    trace: bool | None = None
    prompt_logprobs: Whole | None = None


class CompletionRequest(Generation):
    prompt: str | List[str] | TokenIds | List[TokenIds]
    max_tokens: Length | None = None
    logprobs: TopLogprobs = None
    echo: bool | None = None
    best_of: Whole | None = None
    suffix: str | None = None


class TextPart(Strict):
    others = message_fields.PART

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Strict):
    others = message_fields.PART

    type: Literal["refusal"]
    refusal: str


class ThoughtPart(Strict):
    others = message_fields.THOUGHT

    type: Literal["thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"]
    thinking: str | List[TextPart] | None = None


class CallPart(Strict):
    """A call of a tool as Anthropic's clients write it."""

    others = message_fields.CALL

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None


class ResultPart(Strict):
    """What a tool said, as Anthropic's clients write it."""

    others = message_fields.PART

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | List[TextPart] | None = None
    is_error: bool | None = None


PART_MODELS: tuple[type[BaseModel], ...] = (
    TextPart,
    RefusalPart,
    ThoughtPart,
    CallPart,
    ResultPart,
)
PARTS = {
    kind: model.__name__
    for model in PART_MODELS
    for kind in get_args(model.model_fields["type"].annotation)
}


def _part(value: Any) -> str | None:
    """The model of a part, by its type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return PARTS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[RefusalPart, Tag("RefusalPart")]
    | Annotated[ThoughtPart, Tag("ThoughtPart")]
    | Annotated[CallPart, Tag("CallPart")]
    | Annotated[ResultPart, Tag("ResultPart")],
    Discriminator(
        _part,
        custom_error_type="part",
        custom_error_message=f"a part must be of type {', '.join(PARTS)}: {message_fields.TEXT_ONLY}",
    ),
]
Content = str | List[Part]


class FunctionCall(Strict):
    others = message_fields.CALL

    name: str
    arguments: str | None = None


class ToolCall(Strict):
    others = message_fields.CALL

    id: str
    type: Literal["function"] | None = "function"
    function: FunctionCall


class AnyMessage(Strict):
    """A message but for its calls, which Ollama's clients write in another way."""

    others = message_fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class Message(AnyMessage):
    tool_calls: List[ToolCall] | None = None


class Function(Strict):
    others = message_fields.TOOL

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    others = message_fields.NESTED_TOOL

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class Prediction(Strict):
    type: Literal["content"]
    content: Content


class ChatRequest(Generation):
    messages: Annotated[List[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Annotated[List[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    verbosity: str | None = None
    modalities: List[Literal["text"]] | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[List[Message], Field(max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]


def _item_type(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(ItemType):
        raise PydanticCustomError(
            "item",
            "items of type {kind} are not supported: this server takes {kinds}, and keeps nothing to refer to",
            {"kind": shorten(value), "kinds": ", ".join(get_args(ItemType))},
        )
    return value


class InputItem(Strict):
    """One item of a Responses input: a message, a tool call of ours, what the tool said, or
    thoughts."""

    others = message_fields.ITEM

    type: Annotated[
        ItemType | None, BeforeValidator(_item_type, json_schema_input_type=ItemType | None)
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    summary: List[ThoughtPart] | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def in_one_shape(cls, value: Any) -> Any:
        shaped = _one_shape(value)
        inner = shaped.pop("json_schema", {})
        return shaped | inner if isinstance(inner, dict) else value


class Reasoning(BaseModel):
    """How much the model is to think. A summary of its thoughts is not made, and whatever else
    there is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: Effort | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = None


class FlatTool(Function):
    others = message_fields.FLAT_TOOL

    type: Literal["function"]


class FlatToolChoice(Strict):
    type: Literal["function"]
    name: str


class ResponsesRequest(Sampled):
    """OpenAI's Responses, without memory: what was said before comes with the request."""

    input: str | Annotated[List[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    text: TextOptions | None = None
    tools: Annotated[List[FlatTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: Reasoning | None = None
    include: List[str] | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingsRequest(Body):
    """OpenAI's embeddings."""

    input: str | List[str] | TokenIds | List[TokenIds]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None
    user: str | None = None
