"""Request bodies of every API: OpenAI's fields, common extensions of other servers, and our own.

Unknown fields are refused, types are strict, and null means that a field is absent. Fields that
hosted services use and a local server does not are accepted without effect (`GenerationRequest`);
`fields` has those of other servers. Numbers are read in one way everywhere:

| field | value | meaning |
|---|---|---|
| every integer | `256.0` | 256: JSON does not separate integers from other numbers |
| `max_tokens` and its other names | -1; -2 | as many tokens as fit into the context |
| `seed` | negative | a random seed |
| `top_k` | -1; 0 | all tokens |
| `logprobs` of completions | false | none |

Booleans and strings are not numbers; errors say what to send instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

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
from forerun.server import fields
from forerun.server.errors import ApiError

T = TypeVar("T")
# Stops at the first error: one error for each of a million elements would take gigabytes.
List = Annotated[list[T], Field(fail_fast=True)]

FILL_CONTEXT = -1  # a number of tokens: as many as fit into the context
FILL_CONTEXT_VALUES = (-1, -2)  # what llama.cpp and Ollama send for it
MAX_DEPTH = 64  # tokens of one draft
INTEGER_TEXT = re.compile(r"([+-]?[0-9]{1,30})(\.0{0,30})?")


def _number_error(value: Any, expected: str) -> PydanticCustomError:
    if isinstance(value, str):
        expected += ", without quotation marks"
    context = {"expected": expected, "value": shorten(value)}
    return PydanticCustomError("number", "{expected}, instead of {value}", context)


def read_integer(value: Any) -> Any:
    """Return an integer; a float without a fraction counts as one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _number_error(value, "give a whole number")
    return value


def _read_float(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _number_error(value, "give a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PydanticCustomError("number", "give a smaller number: this one is too large", {})
    return number


def _read_token_ids(value: Any) -> Any:
    """Convert floats among token ids; lists without any are not searched element by element."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [int(item) if type(item) is float and item.is_integer() else item for item in value]
    return value


def _read_length(value: Any) -> int:
    count = read_integer(value)
    if count < 0 and count not in FILL_CONTEXT_VALUES:
        expected = "give a whole number from 1, or -1 for as many tokens as there is room for"
        raise _number_error(value, expected)
    return FILL_CONTEXT if count < 0 else int(count)


def _read_top_k(value: Any) -> int:
    count = read_integer(value)
    if count < -1:
        raise _number_error(value, "give a whole number from 1, or 0 for all tokens")
    return max(int(count), 0)


def _read_top_logprobs(value: Any) -> Any:
    if value is False:
        return None
    if value is True:
        message = "give the number of most likely tokens to list, such as 5"
        raise PydanticCustomError("number", message, {})
    return read_integer(value)


def _read_depth(value: Any) -> Any:
    if value == "auto":
        return value
    depth = -1 if isinstance(value, str) else read_integer(value)
    if not 0 <= depth <= MAX_DEPTH:
        raise _number_error(value, f'give "auto" or a whole number from 0 to {MAX_DEPTH}')
    return depth


def integer_of_text(text: str) -> int | None:
    """Return the integer that a field's name is, such as "50256" or "50256.0", or None."""
    match = INTEGER_TEXT.fullmatch(text)
    return int(match[1]) if match else None


Integer = Annotated[int, BeforeValidator(read_integer)]
Number = Annotated[float, BeforeValidator(_read_float)]
TokenIds = Annotated[List[int], BeforeValidator(_read_token_ids)]
Length = Annotated[int, BeforeValidator(_read_length)]  # tokens to generate, or FILL_CONTEXT
TopK = Annotated[int, BeforeValidator(_read_top_k)]
Depth = Annotated[Literal["auto"] | int, BeforeValidator(_read_depth)]
TopLogprobs = Annotated[int | None, BeforeValidator(_read_top_logprobs)]

MAX_MESSAGES = 4096
Stop = Annotated[str, Field(max_length=256)]
Stops = Stop | Annotated[List[Stop], Field(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
Metadata = Annotated[dict[str, Any], Field(max_length=64)]
CacheSalt = Annotated[str, Field(max_length=256)]  # requests with the same salt share a cache


def _check_biases(value: Any) -> Any:
    """Report the first bias that is not a number, and no further ones, as in lists."""
    if isinstance(value, dict):
        for token, bias in value.items():
            if not isinstance(bias, (int, float)) or isinstance(bias, bool):
                message = "the bias of token {token} must be a number"
                raise PydanticCustomError("bias", message, {"token": token[:20]})
    return value


class StrictModel(BaseModel):
    """An object whose fields are all known: ours, and the foreign fields of its table."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=fields.describe)
    foreign_fields: ClassVar[fields.Table] = {}

    @model_validator(mode="before")
    @classmethod
    def resolve_foreign_fields(cls, value: Any) -> Any:
        """Apply the table of foreign fields and drop fields that are null."""
        if not isinstance(value, dict):
            return value
        known = _field_names(cls)
        if not value.keys() <= known:
            try:
                value, ignored = fields.resolve(value, known, cls.foreign_fields)
            except ApiError as error:
                if issubclass(cls, Body):
                    raise
                # pydantic adds the path of the nested object
                raise PydanticCustomError("field", "{message}", {"message": str(error)}) from None
            fields.note_ignored(ignored)
        return _without_nulls(value, known)


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _without_nulls(value: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Drop known fields that are null."""
    if None not in value.values():
        return value
    return {name: item for name, item in value.items() if item is not None or name not in known}


class Body(StrictModel):
    """The body of a request, as `limits.parse` returns it: valid JSON of a limited size."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def collect_ignored(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Remember which fields of the body and of the objects in it are ignored."""
        with fields.collect_ignored() as names:
            request = handler(value)
        request._ignored = tuple(dict.fromkeys(names))
        return request

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that were sent and have no effect on the text."""
        return self._ignored


class Speculative(StrictModel):
    """Speculation options of one request."""

    draft: str | None = None
    depth: Depth | None = None
    rule: str | None = None


class StreamOptions(StrictModel):
    """Options of OpenAI's and vLLM's streams."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(StrictModel):
    """A JSON schema with a name, as OpenAI's chats write it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


SCHEMA_FIELDS = ("name", "description", "schema", "strict")
FORMAT_VALUES = ("json_schema", "regex", "grammar", "choice")  # each belongs to the type it names
FORMAT_FIELDS = {"type", *SCHEMA_FIELDS, *FORMAT_VALUES}


class ResponseFormat(StrictModel):
    """Format of the text: OpenAI's, and vLLM's regex, choice and grammar (in Lark's notation)."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: List[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def normalise(cls, value: Any) -> Any:
        """Accept the schema beside the type too."""
        return _normalise_format(value)


def _normalise_format(value: Any) -> Any:
    """Return a format as OpenAI's chats write it.

    llama.cpp and the Responses API have the schema beside the type.
    """
    if not isinstance(value, dict):
        raise _format_error('give an object, such as {"type": "json_object"}')
    given = {k: v for k, v in value.items() if v is not None or k not in FORMAT_FIELDS}
    if given.get("type") in ("json_object", "json_schema") and "schema" in given:
        if "json_schema" in given:
            raise _format_error("the schema is given twice, as schema and json_schema: give one")
        named = {name: given.pop(name) for name in SCHEMA_FIELDS if name in given}
        given |= {"type": "json_schema", "json_schema": named}
    kind = given.get("type")
    for name in FORMAT_VALUES:
        if name in given and isinstance(kind, str) and kind != name:
            advice = f"give type {name!r}, or leave {name} out"
            raise _format_error(f"type {kind[:20]!r} has no {name}: {advice}")
    inner = given.get("json_schema")
    if isinstance(inner, dict) and "schema" not in inner and not inner.keys() <= set(SCHEMA_FIELDS):
        expected = '{"name": ..., "schema": ...}'
        raise _format_error(f"json_schema must be {expected}: put the schema into its schema")
    return given


def _format_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("format", "{message}", {"message": message})


class GenerationRequest(Body):
    """Fields of every request that generates; the first seven are accepted without effect."""

    foreign_fields = fields.TABLE

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop: Stops | None = None
    seed: Integer | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stream: bool | None = None
    response_format: ResponseFormat | None = None
    top_k: TopK | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Integer | None = None
    speculative: bool | Speculative | None = None
    cache_salt: CacheSalt | None = None
    parallel_tool_calls: bool | None = None  # false: an answer has at most one call


class OpenAIRequest(GenerationRequest):
    """Fields that completions and chats share."""

    n: Integer | None = None
    logit_bias: Annotated[dict[str, Number], BeforeValidator(_check_biases)] | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    documents: Annotated[List[str], Field(max_length=64)] | None = None
    trace: bool | None = None
    prompt_logprobs: Integer | None = None


class CompletionRequest(OpenAIRequest):
    """/v1/completions."""

    prompt: str | List[str] | TokenIds | List[TokenIds]
    max_tokens: Length | None = None
    logprobs: TopLogprobs = None
    echo: bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None


class TextPart(StrictModel):
    """Text in a message."""

    foreign_fields = fields.PART

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(StrictModel):
    """The model's refusal in a message."""

    foreign_fields = fields.PART

    type: Literal["refusal"]
    refusal: str


class ThoughtPart(StrictModel):
    """The model's reasoning in a message."""

    foreign_fields = fields.THOUGHT

    type: Literal["thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"]
    thinking: str | List[TextPart] | None = None


class CallPart(StrictModel):
    """A tool call in the form of Anthropic's clients."""

    foreign_fields = fields.CALL

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None


class ResultPart(StrictModel):
    """A tool result in the form of Anthropic's clients."""

    foreign_fields = fields.PART

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | List[TextPart] | None = None
    is_error: bool | None = None


PART_MODELS: dict[str, str] = {
    kind: model.__name__
    for model in (TextPart, RefusalPart, ThoughtPart, CallPart, ResultPart)
    for kind in get_args(model.model_fields["type"].annotation)
}


def _part_model(value: Any) -> str | None:
    """Return the name of the model for a part, by its type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return PART_MODELS.get(kind) if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[RefusalPart, Tag("RefusalPart")]
    | Annotated[ThoughtPart, Tag("ThoughtPart")]
    | Annotated[CallPart, Tag("CallPart")]
    | Annotated[ResultPart, Tag("ResultPart")],
    Discriminator(
        _part_model,
        custom_error_type="part",
        custom_error_message=f"a part must be of type {', '.join(PART_MODELS)}: {fields.TEXT_ONLY}",
    ),
]
Content = str | List[Part]


class FunctionCall(StrictModel):
    """Name and JSON arguments of a tool call."""

    foreign_fields = fields.CALL

    name: str
    arguments: str | None = None


class ToolCall(StrictModel):
    """A tool call as OpenAI writes it."""

    foreign_fields = fields.CALL

    id: str
    type: Literal["function"] | None = "function"
    function: FunctionCall


class AnyMessage(StrictModel):
    """A message without its tool calls, whose form differs between OpenAI and Ollama."""

    foreign_fields = fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class Message(AnyMessage):
    """A message of a chat."""

    tool_calls: List[ToolCall] | None = None


class Function(StrictModel):
    """Description of a tool: `parameters` is the JSON schema of its arguments."""

    foreign_fields = fields.TOOL

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool as chats write it."""

    foreign_fields = fields.NESTED_TOOL

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """Name of a tool."""

    name: str


class NamedTool(StrictModel):
    """`tool_choice` of one tool."""

    type: Literal["function"]
    function: FunctionName


class Prediction(StrictModel):
    """Text that the answer probably contains."""

    type: Literal["content"]
    content: Content


class ChatRequest(OpenAIRequest):
    """/v1/chat/completions."""

    messages: Annotated[List[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Annotated[List[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    verbosity: str | None = None
    modalities: List[Literal["text"]] | None = None


class TokenizeRequest(Body):
    """/tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[List[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """/detokenize."""

    model: str | None = None
    tokens: TokenIds


ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]


def _check_item_type(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(ItemType):
        message = (
            "items of type {kind} are not supported: this server takes {kinds}, and stores no items"
        )
        context = {"kind": shorten(value), "kinds": ", ".join(get_args(ItemType))}
        raise PydanticCustomError("item", message, context)
    return value


class InputItem(StrictModel):
    """One item of a Responses input: a message, a tool call, a tool result, or reasoning."""

    foreign_fields = fields.ITEM

    type: Annotated[
        ItemType | None, BeforeValidator(_check_item_type, json_schema_input_type=ItemType | None)
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


class TextFormat(StrictModel):
    """Format of the text as the Responses API writes it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def normalise(cls, value: Any) -> Any:
        """Accept the schema in `json_schema` too."""
        normalised = _normalise_format(value)
        inner = normalised.pop("json_schema", {})
        return normalised | inner if isinstance(inner, dict) else value


class Reasoning(BaseModel):
    """Reasoning effort. Other fields, such as the request for a summary, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    effort: Effort | None = None


class TextOptions(StrictModel):
    """Options for the text of a response."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FlatTool(Function):
    """A tool as the Responses API writes it."""

    foreign_fields = fields.FLAT_TOOL

    type: Literal["function"]


class FlatToolChoice(StrictModel):
    """`tool_choice` of one tool as the Responses API writes it."""

    type: Literal["function"]
    name: str


class ResponsesRequest(GenerationRequest):
    """/v1/responses, stateless: the request holds the whole conversation."""

    input: str | Annotated[List[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
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
    """/v1/embeddings."""

    input: str | List[str] | TokenIds | List[TokenIds]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    user: str | None = None
