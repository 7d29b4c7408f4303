"""Text to tokens and back: tokenizer, chat template, incremental detokenizer with stop strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import LoadError, RequestError
from forerun.models.chat import ChatTemplate, directory_template
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import SPACE, build_tokenizer, chat_templates, special_tokens

Message = dict[str, Any]

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are no character, or not yet

# Classes that add nothing to tokenizer.json, so that it can be read without importing transformers (a second).
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokenizers write as they are
_LEVEL = {chr(b): b for b in _PRINTED} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTED}))}


class Tokenizer:
    """A model's tokenizer, whichever way the model's authors stored it: `path` is a directory or a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises LoadError when there is no usable tokenizer."""
        self.path = path
        self._backend = self._load()

    def _load(self) -> tokenizers.Tokenizer:
        backend = self._from_gguf() if self.path.is_file() else self._from_directory()
        backend.no_truncation()  # what was set for training says nothing about prompts
        backend.no_padding()
        return backend

    def _from_gguf(self) -> tokenizers.Tokenizer:
        file = open_gguf(self.path)
        embedding = file.tensors.get("token_embd.weight")
        try:
            backend = build_tokenizer(file.metadata, embedding.shape[0] if embedding else None)
        except LoadError as error:
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {error}") from None
        if backend is None:
            raise LoadError(f"{self.path} has no tokenizer: its prompts are token ids")
        return backend

    def _from_directory(self) -> tokenizers.Tokenizer:
        try:
            if self._plain:
                return tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
            backend: tokenizers.Tokenizer | None = getattr(self._slow, "backend_tokenizer", None)
        except LoadError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {_line(error)}") from None
        if backend is None:
            raise LoadError(f"the tokenizer in {self.path} has no tokenizer.json form, which forerun needs")
        return backend

    @cached_property
    def _plain(self) -> bool:
        """Whether the directory's files say everything."""
        settings = self.path / "tokenizer_config.json"
        kind = json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") if settings.is_file() else None
        return kind in PLAIN_CLASSES and (self.path / "tokenizer.json").is_file()

    @cached_property
    def _slow(self) -> Any:
        """transformers' tokenizer, where its class adds something to the files."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {_line(error)}") from None

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer once more, to which special tokens are text: threads share the one that finds them."""
        backend = self._load()
        backend.encode_special_tokens = True
        return backend

    def encode(self, text: str, special: bool = True, parse: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            special: add what the model expects around a text (often a first token).
            parse: take special tokens that are spelled out in the text for what they are; else they are text.
        """
        backend = self._backend if parse else self._literal
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=special).ids
        except TypeError:  # lone surrogates, as bytes that are no UTF-8 come in on the command line
            raise RequestError("the prompt is not valid Unicode text: give UTF-8") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def spell(self, token: int) -> str:
        """One token as text, special ones too; bytes that are no character show as a replacement character."""
        text: str = self._backend.decode([token], skip_special_tokens=False)
        if not text.startswith(" ") and self.piece(token).startswith(SPACE):
            return " " + text  # stripped as if a text began here
        return text

    def piece(self, token: int) -> str:
        """One token as the tokenizer writes it."""
        return self._backend.id_to_token(token) or ""

    def spelling(self, token: int) -> bytes:
        """The bytes of one token, those of parts of characters too."""
        text, piece = self.spell(token), self.piece(token)
        if BROKEN not in text:
            return text.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return bytes(_LEVEL[c] for c in piece) if all(c in _LEVEL for c in piece) else text.encode()

    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling and id."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def extended(self, special: str) -> tuple[str, int]:
        """The tokenizer as one JSON text, with one more special token, and the id of that token."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([special])
        return backend.to_str(), backend.token_to_id(special) or 0

    def stream(self, prompt: Sequence[int]) -> Decoding:
        """What decodes one token at a time, going on from `prompt`."""
        return Decoding(self, list(prompt)[-8:])

    def step(self, stream: Decoding, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        return stream.append(token)

    def flush(self, stream: Decoding) -> str:
        """What is left of an unfinished character at the end of an output."""
        return stream.flush()

    def chat(self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; a plain layout where the model has none.

        `tools` are what the assistant may call, as OpenAI writes them; `options` are the template's own.
        """
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f"a chat message needs a role and a content, not {message!r}")
        if not self.has_chat_template:
            return self.encode(_plain_layout(messages, tools))
        try:
            text = self._render(messages, tools, options)
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the model's chat template refuses this conversation: {_line(error)}") from None
        return self.encode(text, special=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], options: dict[str, Any]) -> str:
        if self._template is not None and (self.path.is_file() or self._plain):
            return self._template.render(messages, tools, options)
        text: str = self._slow.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
        )
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._template is not None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.path.is_file():
            metadata = open_gguf(self.path).metadata
            templates = chat_templates(metadata)
            return ChatTemplate(templates, special_tokens(metadata)) if templates else None
        try:
            return directory_template(self.path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LoadError(f"the chat template in {self.path} cannot be read: {_line(error)}") from None


class Decoding:
    """Tokens to text, one at a time: a character is given when it is whole.

    `context` are tokens whose text has been given; they decide how the next ones are spelled (a space before a word,
    say). `pending` are those that do not end in a whole character yet.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        broken = tokenizer.decode(context).endswith(BROKEN)  # the prompt's own half character is not ours to finish
        self.tokenizer, self.context = tokenizer, [] if broken else context
        self.pending: list[int] = []

    def append(self, token: int) -> str:
        """The text that becomes whole with this token."""
        self.pending.append(token)
        text = self._text()
        return "" if text.endswith(BROKEN) else self._give(text)

    def flush(self) -> str:
        """The text of whatever is pending, whole or not."""
        return self._give(self._text()) if self.pending else ""

    def _text(self) -> str:
        given, text = self.tokenizer.decode(self.context), self.tokenizer.decode(self.context + self.pending)
        # a bad byte may spoil a character of the context, which was given already
        return text.removeprefix(given) if text.startswith(given) else self.tokenizer.decode(self.pending)

    def _give(self, text: str) -> str:
        # tokens without text (special ones) are no context by themselves
        self.context = self.pending if text else self.context + self.pending
        self.pending = []
        return text


class TextStream:
    """The text of one output as its tokens arrive: whole characters, nothing past a stop string.

    What might be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = tokenizer.stream(prompt)
        self.text = ""
        self.sent = 0
        self.stopped = False

    def append(self, token: int) -> None:
        """Add one token; `stopped` says whether it completed a stop string, which is then cut off."""
        before = len(self.text)
        self.text += self.tokenizer.step(self.stream, token)
        reach = max(map(len, self.stops), default=0)
        found = [at for at in (self.text.find(s, max(0, before - reach + 1)) for s in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def take(self, finished: bool) -> str:
        """The text that can be shown now and was not before."""
        if finished and not self.stopped:
            self.text += self.tokenizer.flush(self.stream)
        end = len(self.text)
        if not finished:
            end -= max((self._overlap(stop) for stop in self.stops), default=0)
        new = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return new

    def _overlap(self, stop: str) -> int:
        """How much of the end of the text could be the beginning of `stop`."""
        unsent = len(self.text) - self.sent  # what has been shown was no beginning of a stop string
        sizes = range(min(len(stop) - 1, unsent), 0, -1)
        return next((n for n in sizes if self.text.endswith(stop[:n])), 0)


HOW_TO_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def _plain_layout(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """A conversation for a model that has no layout of its own."""
    lines = []
    if tools:
        lines.append(f"system: To call a tool, write {HOW_TO_CALL}. Tools:")
        lines += [json.dumps(tool.get("function", tool)) for tool in tools]
    for message in messages:
        calls = [f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in message.get("tool_calls", ())]
        lines.append(f"{message['role']}: {message['content']}{''.join(calls)}")
    return "\n".join([*lines, "assistant:"])


def _line(error: Exception) -> str:
    """The first line of a library's message."""
    return (str(error).strip() or repr(error)).splitlines()[0]
