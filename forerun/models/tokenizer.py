"""`Tokenizer`: text to token ids and back, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import BusyError, LoadError, RequestError, first_line, one_line, shorten
from forerun.models.chat_template import SANDBOX, ChatTemplate, directory_template, plain_layout
from forerun.models.files import check_pointer, read_object, read_text
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import SPACE, build_tokenizer, chat_templates, special_tokens

Message = dict[str, Any]

BROKEN = "\N{REPLACEMENT CHARACTER}"  # decoders emit it for bytes that form no character yet
# from this many characters or tokens on, work runs as a batch of one, which releases the GIL
LONG = 4096
MAX_PENDING = 64  # tokens that may stay without a whole character before they are shown as they are
CONTEXT_TOKENS = 8  # of the prompt: they decide whether the first word has a leading space

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
# classes that add nothing to tokenizer.json, so that importing transformers (a second) is avoided
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

# byte-level BPE writes printable bytes as themselves and the others as characters from U+0100 on
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF_CHARACTER = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}


class Tokenizer:
    """The tokenizer of a model directory or GGUF file, in any supported format."""

    def __init__(self, path: Path) -> None:
        """Load it. Raises LoadError if there is no usable tokenizer."""
        self.path = path
        self._is_confined = False
        self._backend = self._load()

    # ------------------------------------------------------------ loading

    def _load(self) -> tokenizers.Tokenizer:
        backend = self._from_gguf() if self.path.is_file() else self._from_directory()
        backend.no_truncation()  # settings left from training do not apply to prompts
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
            if self._is_plain:
                return tokenizers.Tokenizer.from_str(read_text(self.path / "tokenizer.json"))
            backend: tokenizers.Tokenizer | None = getattr(self._slow, "backend_tokenizer", None)
        except (LoadError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the tokenizers library raises bare Exception, and panics
            why = one_line(first_line(error))
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {why}") from None
        if backend is None:
            raise LoadError(
                f"the tokenizer in {self.path} has no tokenizer.json form, which forerun needs"
            )
        return backend

    @cached_property
    def _is_plain(self) -> bool:
        """Return True if tokenizer.json is sufficient, so that transformers is not needed."""
        settings = self.path / "tokenizer_config.json"
        kind = read_object(settings).get("tokenizer_class") if settings.exists() else None
        is_plain = isinstance(kind, str) and kind in PLAIN_CLASSES
        return is_plain and (self.path / "tokenizer.json").is_file()

    @cached_property
    def _slow(self) -> Any:
        """Return the tokenizer of transformers; code beside the files is never run."""
        from transformers import AutoTokenizer

        for name in TOKENIZER_FILES:
            check_pointer(self.path / name)
        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            why = one_line(first_line(error))
            if "trust_remote_code" in str(error):
                why = (
                    "its class is code beside it, which forerun never runs; use a model with a "
                    "plain tokenizer.json"
                )
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {why}") from None

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """Return an instance that treats special tokens as text; the setting is not per call."""
        backend = self._load()
        backend.encode_special_tokens = True
        return backend

    # ------------------------------------------------------------ encoding and decoding

    def encode(self, text: str, special: bool = True, parse: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            text: any text.
            special: add the tokens the model expects around a text, such as bos.
            parse: recognise special tokens spelled out in the text; otherwise they are text.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        backend = self._backend if parse else self._literal
        try:
            if len(text) < LONG:
                ids: list[int] = backend.encode(text, add_special_tokens=special).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:  # lone surrogates, which invalid UTF-8 on the command line becomes
            raise RequestError("the prompt is not valid Unicode text: give UTF-8") from None
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize many texts on all cores, without tokens around them."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        if len(ids) < LONG:
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        else:
            text = self._backend.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return text

    def stream(self, prompt: Sequence[int]) -> IncrementalDecoder:
        """Return a decoder of one token at a time that continues `prompt`."""
        return IncrementalDecoder(self, list(prompt)[-CONTEXT_TOKENS:])

    def spell(self, token: int) -> str:
        """Return the text of one token, special ones included; incomplete characters show as
        U+FFFD."""
        text: str = self._backend.decode([token], skip_special_tokens=False)
        if not text.startswith(" ") and self.piece(token).startswith(SPACE):
            return " " + text  # decoding strips the space at the beginning of a text
        return text

    def piece(self, token: int) -> str:
        """Return the vocabulary entry of a token."""
        return self._backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, also those of a part of a character."""
        text, piece = self.spell(token), self.piece(token)
        if BROKEN not in text:
            return text.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        if all(c in _BYTE_OF_CHARACTER for c in piece):
            return bytes(_BYTE_OF_CHARACTER[c] for c in piece)
        return text.encode()

    def vocabulary_bytes(self, count: int) -> list[bytes]:
        """Return the bytes of tokens 0..count-1 as they continue a text; b"" for special tokens."""
        before = self.encode("a", special=False)  # at the beginning a token may lose its space
        prefix = self.decode(before)
        sequences = [[*before, token] for token in range(count)]
        texts = self._backend.decode_batch(sequences, skip_special_tokens=True)
        own = [text.removeprefix(prefix) for text in texts]
        return [self.token_bytes(i) if BROKEN in t else t.encode() for i, t in enumerate(own)]

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that decoding leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def vocabulary(self) -> dict[str, int]:
        """Return every vocabulary entry and its id."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def with_special_token(self, text: str) -> tuple[str, int]:
        """Return tokenizer.json with one more special token, and the id of that token."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([text])
        return backend.to_str(), backend.token_to_id(text) or 0

    # ------------------------------------------------------------ conversations

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: Any
    ) -> list[int]:
        """Tokenize a conversation up to where the assistant answers.

        Args:
            messages: dicts with a role and a content, in OpenAI's format.
            tools: functions the assistant may call, in OpenAI's format.
            options: variables of the model's own template.

        A model without a template gets a plain layout. Raises RequestError for malformed messages
        and conversations the template rejects, BusyError if the sandbox is overloaded."""
        for message in messages:
            _check_message(message)
        if self._template is None:
            return self.encode(plain_layout(messages, tools))
        render = self._template.render_confined if self._is_confined else self._template.render
        try:
            text = render(messages, tools, options)
        except BusyError:
            raise
        except Exception as error:  # templates may raise anything
            why = one_line(first_line(error))
            raise RequestError(
                f"the model's chat template refuses this conversation: {why}"
            ) from None
        return self.encode(text, special=False)

    def confine(self) -> None:
        """Render conversations in worker processes with limits from now on, since templates or
        messages are untrusted."""
        self._is_confined = True
        if self.has_chat_template:
            SANDBOX.warm()

    @property
    def has_chat_template(self) -> bool:
        """True if the model comes with a chat template."""
        return self._template is not None

    @property
    def template(self) -> str:
        """The model's default chat template in Jinja, or ""."""
        return self._template.templates.get("default", "") if self._template else ""

    def check(self, vocab: int) -> str:
        """Return a description of features that a model of `vocab` tokens would break, or "".

        Raises LoadError if nothing would work."""
        outside = [token for token in self.encode("") if token >= vocab]
        if outside:
            raise LoadError(
                f"the tokenizer in {self.path} adds token {outside[0]} to every text, but the "
                f"model has only {vocab}: it belongs to another model"
            )
        fault = self._template.fault() if self._template else ""
        if not fault:
            return ""
        return f"the chat template in {self.path} cannot be used, so chats will be refused: {fault}"

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.path.is_file():
            metadata = open_gguf(self.path).metadata
            templates = chat_templates(metadata)
            return ChatTemplate(templates, special_tokens(metadata)) if templates else None
        try:
            template = directory_template(self.path)
            if template is not None and not self._is_plain:
                return template.with_tokens(self._slow.special_tokens_map)
            return template
        except (LoadError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = one_line(str(error))
            raise LoadError(f"the chat template in {self.path} cannot be read: {why}") from None


def _check_message(message: Any) -> None:
    """Raise RequestError unless this is a message with a role and a content."""
    is_dict = isinstance(message, dict)
    if not is_dict or not isinstance(message.get("role"), str) or "content" not in message:
        raise RequestError(f"a chat message needs a role and a content, not {shorten(message)}")
    if not isinstance(message["content"], str | list | tuple | None):
        raise RequestError(
            f"the content of a chat message is a text, not {shorten(message['content'])}"
        )


# ---------------------------------------------------------------- incremental decoding


class IncrementalDecoder:
    """Decodes one token at a time and emits characters once they are whole.

    `context` are recent tokens whose text was emitted; they decide how the next ones are spelled (a
    space before a word, say). `pending` are tokens that do not end in a whole character yet.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        # an incomplete character at the end of the prompt is not completed
        is_incomplete = tokenizer.decode(context).endswith(BROKEN)
        self.tokenizer = tokenizer
        self.context = [] if is_incomplete else context
        self.special = tokenizer.special
        self.pending: list[int] = []

    def append(self, token: int) -> str:
        """Return the text that becomes whole with this token."""
        self.pending.append(token)
        text = self._pending_text()
        is_incomplete = text.endswith(BROKEN) and len(self.pending) < MAX_PENDING
        return "" if is_incomplete else self._emit(text)

    def flush(self) -> str:
        """Return the text of all pending tokens, even if a character is incomplete."""
        return self._emit(self._pending_text()) if self.pending else ""

    def _pending_text(self) -> str:
        emitted = self.tokenizer.decode(self.context)
        text = self.tokenizer.decode(self.context + self.pending)
        if text.startswith(emitted):
            return text.removeprefix(emitted)
        return self.tokenizer.decode(self.pending)  # a bad byte changed a character of the context

    def _emit(self, text: str) -> str:
        # tokens without text cannot serve as context alone, and special ones never do
        visible = [t for t in self.pending if t not in self.special]
        self.context = self.pending if text else self.context + visible
        self.pending = []
        return text


# ---------------------------------------------------------------- stop strings


class StopAutomaton:
    """Aho-Corasick automaton of the stop strings, built in time linear in their length.

    State 0 is the empty prefix. For each state, `length` is the length of its prefix, `ends` the
    length of the longest stop string it ends with (0: none), and `fail` the state of its longest
    proper suffix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.length = [0]
        self.ends = [0]
        for stop in stops:
            self._insert(stop)
        self._connect()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.length.append(self.length[state] + 1)
                self.ends.append(0)
            state = self.next[state][character]
        self.ends[state] = len(stop)

    def _connect(self) -> None:
        """Set `fail`, and `ends` of states that end with a shorter stop string, breadth first."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self.next[state].items():
                self.fail[longer] = self.follow(self.fail[state], character)
                self.ends[longer] = self.ends[longer] or self.ends[self.fail[longer]]
                waiting.append(longer)

    def follow(self, state: int, character: str) -> int:
        """Return the state after one more character; amortised constant time over a text."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


@lru_cache(maxsize=8)  # shared by the n completions of a request
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of these stop strings."""
    return StopAutomaton(stops)


class StopMatcher:
    """Looks for stop strings in one text as it arrives."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self.automaton = automaton
        self.state = 0

    def feed(self, piece: str) -> int | None:
        """Read on; return the start of the first stop string that ends in `piece`, relative to the
        start of `piece`."""
        automaton, state = self.automaton, self.state
        found = []
        for at, character in enumerate(piece, start=1):
            state = automaton.follow(state, character)
            if automaton.ends[state]:
                found.append(at - automaton.ends[state])
        self.state = state
        return min(found, default=None)

    @property
    def partial_length(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return self.automaton.length[self.state]


class TextStream:
    """The text of one output as its tokens arrive: whole characters, nothing past a stop string.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    `stopped` is True once a stop string was completed; it is cut off.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.stream = tokenizer.stream(prompt)
        self.stops = StopMatcher(stop_automaton(tuple(stops))) if stops else None
        self.stopped = False
        self._shown: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All text so far, including text that is held back."""
        return "".join((*self._shown, self._held))

    def append(self, token: int) -> None:
        """Add one token and update `stopped`."""
        before = len(self._held)
        piece = self.stream.append(token)
        self._held += piece
        at = self.stops.feed(piece) if self.stops else None
        if at is not None:
            self._held = self._held[: before + at]
            self.stopped = True

    def take(self, finished: bool) -> str:
        """Return the text that can be shown now and was not before."""
        if finished and not self.stopped:
            self._held += self.stream.flush()
        partial = self.stops.partial_length if self.stops and not finished else 0
        end = max(0, len(self._held) - partial)
        new = self._held[:end]
        self._held = self._held[end:]
        self._shown.append(new)
        return new
