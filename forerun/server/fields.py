"""Fields of other servers and their clients, and what forerun does with each of them.

Every known field that is not ours follows one of three rules. It is an alias of one of our fields,
it has no effect on the text (the response then names it in the header X-Forerun-Ignored), or it is
accepted only with the value that means what forerun does anyway. All other fields are refused, so
that no request is answered with other settings than it asked for.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from forerun.errors import shown
from forerun.server.errors import ApiError

HEADER = "X-Forerun-Ignored"
Json = dict[str, Any]
_IGNORED: ContextVar[list[str]] = ContextVar("names of ignored fields of the validated request")


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of one of our fields: the first of `targets` that the endpoint has.

    `convert(name, value)` returns the value of our field; `schema` is the JSON schema of the alias
    where it differs from that of our field.
    """

    targets: tuple[str, ...]
    convert: Callable[[str, Any], Any] = lambda _name, value: value
    schema: Json | None = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A field that is ignored because the text does not depend on it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restricted:
    """A field that is accepted with these `values` only.

    Other values are refused where `when(request)` is true, with `advice` on what to send instead.
    """

    values: tuple[Any, ...]
    advice: str
    when: Callable[[Json], bool] = lambda _request: True


Table = dict[str, Alias | NoEffect | Restricted]


def _table(*rows: tuple[str, Alias | NoEffect | Restricted]) -> Table:
    """Build a table from rows of (names separated by spaces, rule)."""
    return {name: rule for names, rule in rows for name in names.split()}


def _has_penalties(request: Json) -> bool:
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return any(request.get(name) not in (None, value) for name, value in neutral.items())


def _schema_format(name: str, value: Any) -> Json:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{name} is not JSON: give a JSON schema", name) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be a JSON schema, as an object or as text", name)
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _format_of(kind: str, type_: type, expected: str) -> Callable[[str, Any], Json]:
    """Return a converter to a response_format of this type that holds nothing but the value."""

    def convert(name: str, value: Any) -> Json:
        if not isinstance(value, type_):
            raise ApiError(400, f"{name} must be {expected}", name)
        return {"type": kind, kind: value}

    return convert


_regex = _format_of("regex", str, "a string")
_grammar = _format_of("grammar", str, "a string")
_choice = _format_of("choice", list, "a list of strings")
STRUCTURED = {"json": _schema_format, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _structured_outputs(name: str, value: Any) -> Json:
    given: Json = {}
    if isinstance(value, dict):
        given = {kind: item for kind, item in value.items() if item not in (None, False)}
    if given == {"json_object": True}:
        return {"type": "json_object"}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        kinds = ", ".join(STRUCTURED)
        raise ApiError(400, f"{name} must have exactly one of {kinds} and json_object", name)
    ((kind, item),) = given.items()
    return STRUCTURED[kind](f"{name}.{kind}", item)


def _enable_thinking(name: str, value: Any) -> Json:
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", name)
    return {"enable_thinking": value}


LENGTH = ("max_tokens", "max_output_tokens")
FORMAT = ("response_format",)
OBJECT = {"type": "object"}
TEXT = {"type": "string"}
SCHEMA = {"anyOf": [OBJECT, TEXT]}
TEXT_ONLY = "this server reads and writes text only"
OWN_LAYOUT = "format the conversation yourself and send it to /v1/completions"
SEVERAL = "use n for several completions"
SAMPLERS = "leave it out; the samplers are temperature, top_k, top_p and min_p"
WHOLE_TEXT = "penalties apply to the whole text here"

TABLE: Table = _table(
    # aliases
    ("repeat_penalty", Alias(("repetition_penalty",))),
    ("n_predict num_predict max_new_tokens", Alias(LENGTH)),
    ("min_new_tokens", Alias(("min_tokens",))),
    ("guided_json json_schema", Alias(FORMAT, _schema_format, SCHEMA)),
    ("guided_regex", Alias(FORMAT, _regex, TEXT)),
    ("guided_choice", Alias(FORMAT, _choice, {"type": "array", "items": TEXT})),
    ("guided_grammar", Alias(FORMAT, _grammar, TEXT)),
    ("structured_outputs", Alias(FORMAT, _structured_outputs, OBJECT)),
    ("enable_thinking", Alias(("chat_template_kwargs",), _enable_thinking, {"type": "boolean"})),
    # without effect on the text
    (
        "num_ctx num_batch num_gpu main_gpu num_thread numa use_mmap use_mlock low_vram f16_kv "
        "vocab_only",
        NoEffect("memory and threads are options of the server"),
    ),
    ("keep_alive ttl", NoEffect("the model stays loaded")),
    ("cache_prompt id_slot slot_id", NoEffect("a cache cannot change the text here")),
    ("priority request_id", NoEffect("requests are served in order of arrival")),
    ("num_keep n_keep n_discard", NoEffect("the context is never shifted here")),
    (
        "draft_model speculative.n_max speculative.n_min speculative.p_min",
        NoEffect("drafts cannot change the text"),
    ),
    (
        "length_penalty early_stopping mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold "
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        NoEffect("the sampler it belongs to is refused"),
    ),
    ("guided_decoding_backend", NoEffect("there is one backend")),
    ("spaces_between_special_tokens", NoEffect("special tokens are not part of the text")),
    ("timings_per_token", NoEffect("responses have usage and metrics")),
    ("return_progress", NoEffect("it adds nothing to the text")),
    # accepted with the value that means what happens here
    ("use_beam_search", Restricted((False,), SEVERAL)),
    ("best_of", Restricted((1,), SEVERAL)),
    ("tfs_z tfs typical_p typical", Restricted((1,), SAMPLERS)),
    (
        "mirostat mirostat_mode top_a epsilon_cutoff eta_cutoff penalty_alpha dynatemp_range "
        "xtc_probability dry_multiplier smoothing_factor no_repeat_ngram_size min_keep",
        Restricted((0,), SAMPLERS),
    ),
    ("dynamic_temperature", Restricted((False,), SAMPLERS)),
    ("top_n_sigma", Restricted((-1, 0), SAMPLERS)),
    ("guidance_scale encoder_repetition_penalty", Restricted((1,), "leave it out")),
    ("samplers", Restricted(([],), SAMPLERS)),
    ("repeat_last_n", Restricted((-1,), f"{WHOLE_TEXT}: leave it out or give -1", _has_penalties)),
    ("penalize_nl", Restricted((True,), f"{WHOLE_TEXT}: leave it out", _has_penalties)),
    ("logits_processors bad_words", Restricted(([],), "use logit_bias")),
    ("allowed_token_ids", Restricted((), "use logit_bias or response_format of type choice")),
    ("add_special_tokens", Restricted((), "to avoid them give /v1/completions token ids")),
    ("skip_special_tokens", Restricted((True,), "return_token_ids returns every token")),
    ("include_stop_str_in_output", Restricted((False,), "the text ends before the stop string")),
    ("detokenize", Restricted((True,), "return_token_ids returns token ids beside the text")),
    ("return_tokens_as_token_ids", Restricted((False,), "use return_token_ids")),
    ("echo", Restricted((False,), "/v1/completions has echo")),
    ("add_generation_prompt", Restricted((True,), OWN_LAYOUT)),
    ("continue_final_message", Restricted((False,), OWN_LAYOUT)),
    ("chat_template", Restricted((), f"the model's own template is used; {OWN_LAYOUT}")),
    ("truncate_prompt_tokens", Restricted((-1,), "/tokenize counts tokens; shorten the prompt")),
    ("prompt_logprobs", Restricted((0,), "/v1/completions and /v1/chat/completions have it")),
    ("n_probs", Restricted((0,), "use logprobs")),
    ("post_sampling_probs", Restricted((False,), "use logprobs")),
    ("t_max_predict_ms", Restricted((0, -1), "use max_tokens")),
    ("n_indent", Restricted((0,), "leave it out")),
    ("grammar", Restricted(("",), "give response_format of type grammar, in Lark's notation")),
    ("guided_whitespace_pattern", Restricted((), "leave it out, or use guided_regex")),
    ("lora", Restricted(([],), "adapters are not supported")),
    ("reasoning_format", Restricted(("none", "auto"), "thoughts stay in the text")),
    ("functions", Restricted(([],), "use tools")),
    ("function_call", Restricted(("none", "auto"), "use tool_choice")),
    ("audio web_search_options", Restricted((), TEXT_ONLY)),
)

# Within conversations: clients send messages back with whatever their library has added to them.
THOUGHTS = Alias(("reasoning_content", "thinking"))
SEALED = NoEffect("only the server that wrote it can read it")
IN_FUNCTION = Restricted((), 'put it into "function"')
SOURCES = NoEffect("sources are no part of the text")
UNUSED = NoEffect("templates have no place for it")
EARLIER = NoEffect("it describes an earlier response")

SHARED: Table = _table(  # of every object in a conversation
    ("cache_control prompt_cache_breakpoint", NoEffect("a cache cannot change the text here")),
    ("id object status phase created created_at createdAt timestamp", UNUSED),
    ("metadata additional_kwargs response_metadata", NoEffect("it is the client's own")),
    ("usage usage_metadata model extra_content", EARLIER),
    (
        "provider_specific_fields provider_options providerOptions provider_metadata "
        "providerMetadata",
        NoEffect("it is for another server"),
    ),
    ("signature thought_signature encrypted_content", SEALED),
)
MESSAGE: Table = SHARED | _table(
    ("reasoning thinking", THOUGHTS),
    ("tool_name", Alias(("name",))),
    ("reasoning_details thinking_blocks", NoEffect("thoughts are read from reasoning_content")),
    ("annotations citations", SOURCES),
    ("parsed", NoEffect("it is read from the content")),
    ("audio images videos audios", Restricted(([],), TEXT_ONLY)),
    ("function_call", Restricted((), "use tool_calls")),
    ("prefix partial", Restricted((False,), OWN_LAYOUT)),
)
PART: Table = SHARED | _table(
    ("annotations citations", SOURCES),
    ("logprobs", EARLIER),
    ("parsed", NoEffect("it is read from the text")),
)
THOUGHT: Table = SHARED | _table(("text reasoning", Alias(("thinking",))), ("data", SEALED))
CALL: Table = SHARED | _table(
    ("index", NoEffect("calls are in order")),
    ("parsed_arguments", NoEffect("it is read from the arguments")),
    ("description", NoEffect("a call needs none")),
    ("custom", Restricted((), "give a call of type function")),
)
TOOL: Table = SHARED | _table(
    ("defer_loading", Restricted((False,), "the model sees every tool from the beginning")),
    ("allowed_callers", Restricted((["direct"],), "only the model calls tools")),
    ("async async_ eager_input_streaming", NoEffect("calls are sent as soon as they are complete")),
    ("output_schema", NoEffect("results of tools are not checked")),
    ("input_schema", Alias(("parameters",), schema=OBJECT)),
)
NESTED_TOOL: Table = SHARED | _table(
    ("name description parameters strict input_schema", IN_FUNCTION),
)
FLAT_TOOL: Table = TOOL | _table(("function", Restricted((), "put its fields beside the type")))
ITEM: Table = {name: rule for name, rule in (MESSAGE | CALL).items() if name != "tool_name"}
ITEM |= _table(
    ("caller namespace async async_ created_by", NoEffect("a call needs none")),
    ("tool_calls", Restricted(([],), "give items of type function_call")),
    ("tool_call_id", Restricted((), "give call_id, in an item of type function_call_output")),
)


@contextmanager
def collect_ignored() -> Iterator[list[str]]:
    """Collect the names of ignored fields of one request, including those of nested objects."""
    names: list[str] = []
    token = _IGNORED.set(names)
    try:
        yield names
    finally:
        _IGNORED.reset(token)


def note_ignored(names: Iterable[str]) -> None:
    """Record that these fields of the request being validated are ignored."""
    _IGNORED.get([]).extend(names)


def resolve(value: Json, known: Collection[str], table: Table) -> tuple[Json, tuple[str, ...]]:
    """Return the object with `known` fields only, and the names of ignored fields.

    Raises ApiError for unknown fields and for values that are refused.
    """
    own: Json = {name: item for name, item in value.items() if name in known}
    ignored: list[str] = []
    restricted: list[tuple[str, Any, Restricted]] = []
    for name, item in value.items():
        if name in known:
            continue
        rule = table.get(name)
        if rule is None:
            raise unknown_field(name, [*known, *table])
        if item is None or (isinstance(rule, NoEffect) and item in ([], {})):
            continue  # it means the same as an absent field
        if isinstance(rule, Alias):
            _apply_alias(own, name, item, rule, known)
        elif isinstance(rule, NoEffect):
            ignored.append(name)
        else:
            restricted.append((name, item, rule))
    for name, item, rule in restricted:  # `when` looks at the fields that aliases have set
        if item not in rule.values and rule.when(own):
            given = f"={shown(item)}" if isinstance(item, (bool, int, float, str)) else ""
            raise ApiError(400, f"{name}{given} is not supported: {rule.advice}", name)
    return own, tuple(ignored)


def _apply_alias(own: Json, name: str, value: Any, rule: Alias, known: Collection[str]) -> None:
    target = next((target for target in rule.targets if target in known), None)
    if target is None:
        raise ApiError(400, f"{name} is not supported by this endpoint: leave it out", name)
    converted = rule.convert(name, value)
    if own.get(target) not in (None, converted):
        message = f"{name} sets {target}, which another field of the request sets too: give one"
        raise ApiError(400, message, name)
    own[target] = converted


def unknown_field(name: str, known: Collection[str]) -> ApiError:
    """Return the error for a field that is not `known`; it names the most similar known field."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "/docs lists the fields of this endpoint"
    param = name if name.isidentifier() else None
    return ApiError(400, f"there is no field {shown(name[:64])}: {hint}", param)


def describe(schema: Json, model: Any) -> None:
    """Add the table of a model to its published JSON schema."""
    properties = schema.get("properties", {})
    for name, rule in model.foreign_fields.items():
        if name in properties:
            continue
        if isinstance(rule, NoEffect):
            properties[name] = {"description": f"Ignored: {rule.reason}."}
        elif isinstance(rule, Restricted):
            description = f"Other values are refused: {rule.advice}."
            properties[name] = {"enum": [*rule.values, None], "description": description}
        elif target := next((item for item in rule.targets if item in model.model_fields), None):
            published = rule.schema or properties[target]
            properties[name] = published | {"description": f"Becomes {target}."}
