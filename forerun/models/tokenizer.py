"""Text to tokens and back: tokenizer, chat template, incremental detokenizer with stop strings."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from forerun.errors import BusyError, LoadError, RequestError, one_line, shorten
from forerun.models.chat_template import SANDBOX, ChatTemplate, directory_template, plain_layout
from forerun.models.files import check_pointer, read_object, read_text
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import SPACE, build_tokenizer, chat_templates, special_tokens


class StopAutomaton:
    """The states are the beginnings of the stop strings; 0 is the empty one. Made in time linear in
    their length.

    `length[s]` is how long a state's string is, `ends[s]` the longest stop string that it ends
    with, `link[s]` the state of its longest proper suffix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.link, self.length, self.ends = [0], [0], [0]
        for stop in stops:
            self._insert(stop)
        self._connect()

    def _insert(self, stop: str) -> None:
        at = 0
        for character in stop:
            if character not in self.next[at]:
                self.next[at][character] = len(self.next)
                self.next.append({})
                self.link.append(0)
                self.length.append(self.length[at] + 1)
                self.ends.append(0)
            at = self.next[at][character]
        self.ends[at] = len(stop)

    def _connect(self) -> None:
        """Links and what suffixes end with, shortest strings first."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self.next[state].items():
                self.link[longer] = self.follow(self.link[state], character)
                self.ends[longer] = self.ends[longer] or self.ends[self.link[longer]]
                waiting.append(longer)

    def follow(self, state: int, character: str) -> int:
        """The state behind one more character; amortised constant time over a text."""
        while state and character not in self.next[state]:
            state = self.link[state]
        return self.next[state].get(character, 0)


class StopMatcher:
    """Where one text stands in an automaton."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self.automaton, self.state = automaton, 0

    def feed(self, piece: str) -> int | None:
        """Read on. Where the first stop string that ends in `piece` begins, counted from the
        beginning of `piece`."""
        automaton, state, found = self.automaton, self.state, list[int]()
        for at, character in enumerate(piece, start=1):
            state = automaton.follow(state, character)
            if automaton.ends[state]:
                found.append(at - automaton.ends[state])
        self.state = state
        return min(found, default=None)

    @property
    def begun(self) -> int:
        """How much of the end of the text is the beginning of a stop string."""
        return self.automaton.length[self.state]


@lru_cache(maxsize=8)  # the n completions of a request share one
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings."""
    return StopAutomaton(stops)


Message = dict[str, Any]

BROKEN = (
    "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are no character, or not yet
)
# characters, or tokens: from there on as a batch of one, for which the interpreter's lock is
# released
LONG = 4096
MOST_PENDING = (
    64  # tokens that may make no whole character: from there on they are shown as they are
)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
# Classes that add nothing to tokenizer.json, so that it can be read without importing transformers
# (a second).
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


_PRINTED = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]  # bytes that byte-level tokenizers write as they are
_LEVEL = {chr(b): b for b in _PRINTED} | {
    chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTED}))
}


class Tokenizer:
    """A model's tokenizer, whichever way the model's authors stored it: `path` is a directory or a
    GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises LoadError when there is no usable tokenizer."""
        self.path, self._confined = path, False
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
                return tokenizers.Tokenizer.from_str(read_text(self.path / "tokenizer.json"))
            backend: tokenizers.Tokenizer | None = getattr(self._slow, "backend_tokenizer", None)
        except (LoadError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the tokenizers library raises bare Exception, and panics
            raise LoadError(
                f"the tokenizer in {self.path} cannot be read: {_line(error)}"
            ) from None
        if backend is None:
            raise LoadError(
                f"the tokenizer in {self.path} has no tokenizer.json form, which forerun needs"
            )
        return backend

    @cached_property
    def _plain(self) -> bool:
        """Whether the directory's files say everything."""
        settings = self.path / "tokenizer_config.json"
        kind = read_object(settings).get("tokenizer_class") if settings.exists() else None
        return (
            isinstance(kind, str)
            and kind in PLAIN_CLASSES
            and (self.path / "tokenizer.json").is_file()
        )

    @cached_property
    def _slow(self) -> Any:
        """transformers' tokenizer, where its class adds something to the files. Code beside them is
        never run."""
        from transformers import AutoTokenizer

        for name in TOKENIZER_FILES:
            check_pointer(self.path / name)
        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            why = _line(error)
            if "trust_remote_code" in str(error):
                why = "its class is code beside it, which forerun never runs; use a model with a plain tokenizer.json"
            raise LoadError(f"the tokenizer in {self.path} cannot be read: {why}") from None

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer once more, to which special tokens are text: threads share the one that
        finds them."""
        backend = self._load()
        backend.encode_special_tokens = True
        return backend

    def encode(self, text: str, special: bool = True, parse: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            special: add what the model expects around a text (often a first token).
            parse: take special tokens that are spelled out in the text for what they are; else they
                are text.
        """
        backend = self._backend if parse else self._literal
        try:
            if len(text) < LONG:
                ids: list[int] = backend.encode(text, add_special_tokens=special).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:  # lone surrogates, as bytes that are no UTF-8 come in on the command line
            raise RequestError("the prompt is not valid Unicode text: give UTF-8") from None
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without what a model expects around them, on all cores."""
        return [
            found.ids
            for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        if len(ids) < LONG:
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        else:
            text = self._backend.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return text

    def spell(self, token: int) -> str:
        """One token as text, special ones too; bytes that are no character show as a replacement
        character."""
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

    def spellings(self, count: int) -> list[bytes]:
        """The bytes of the tokens below `count` as they stand behind other text; none where
        decoding gives none."""
        before = self.encode("a", special=False)  # what stands first may lose its space
        given = self.decode(before)
        texts = self._backend.decode_batch(
            [[*before, token] for token in range(count)], skip_special_tokens=True
        )
        own = [text.removeprefix(given) for text in texts]
        return [self.spelling(i) if BROKEN in text else text.encode() for i, text in enumerate(own)]

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that decoding leaves out."""
        return frozenset(
            i for i, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

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

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer; a plain layout where the
        model has none.

        `tools` are what the assistant may call, as OpenAI writes them; `options` are the template's
        own."""
        for message in messages:
            if (
                not isinstance(message, dict)
                or not isinstance(message.get("role"), str)
                or "content" not in message
            ):
                raise RequestError(
                    f"a chat message needs a role and a content, not {shorten(message)}"
                )
            if not isinstance(message["content"], str | list | tuple | None):
                raise RequestError(
                    f"the content of a chat message is a text, not {shorten(message['content'])}"
                )
        if self._template is None:
            return self.encode(plain_layout(messages, tools))
        try:
            render = self._template.render_confined if self._confined else self._template.render
            text = render(messages, tools, options)
        except BusyError:
            raise
        except Exception as error:  # templates raise what they like
            raise RequestError(
                f"the model's chat template refuses this conversation: {_line(error)}"
            ) from None
        return self.encode(text, special=False)

    def confine(self) -> None:
        """From now on lay conversations out in processes that can be killed: template or messages
        are a stranger's."""
        self._confined = True
        if self.has_chat_template:
            SANDBOX.warm()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._template is not None

    def check(self, vocab: int) -> str:
        """What of it will not work with a model of `vocab` tokens, but does no harm to the rest; ""
        where all does. Raises LoadError where nothing would."""
        outside = [token for token in self.encode("") if token >= vocab]
        if outside:
            raise LoadError(
                f"the tokenizer in {self.path} adds token {outside[0]} to every text, but the model has only {vocab}:"
                " it is another model's"
            )
        fault = self._template.fault() if self._template else ""
        return (
            f"the chat template in {self.path} cannot be used, so chats will be refused: {fault}"
            if fault
            else ""
        )

    @property
    def template(self) -> str:
        """How the model's authors lay conversations out, in Jinja; "" where they do not say."""
        return self._template.templates.get("default", "") if self._template else ""

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self.path.is_file():
            metadata = open_gguf(self.path).metadata
            templates = chat_templates(metadata)
            return ChatTemplate(templates, special_tokens(metadata)) if templates else None
        try:
            template = directory_template(self.path)
            return (
                template
                if template is None or self._plain
                else template.with_tokens(self._slow.special_tokens_map)
            )
        except (LoadError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise LoadError(
                f"the chat template in {self.path} cannot be read: {one_line(str(error))}"
            ) from None


class Decoding:
    """Tokens to text, one at a time: a character is given when it is whole.

    `context` are tokens whose text has been given; they decide how the next ones are spelled (a
    space before a word, say). `pending` are those that do not end in a whole character yet.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        broken = tokenizer.decode(context).endswith(
            BROKEN
        )  # the prompt's own half character is not ours to finish
        self.tokenizer, self.context = tokenizer, [] if broken else context
        self.special = tokenizer.special
        self.pending: list[int] = []

    def append(self, token: int) -> str:
        """The text that becomes whole with this token."""
        self.pending.append(token)
        text = self._text()
        waits = text.endswith(BROKEN) and len(self.pending) < MOST_PENDING
        return "" if waits else self._give(text)

    def flush(self) -> str:
        """The text of whatever is pending, whole or not."""
        return self._give(self._text()) if self.pending else ""

    def _text(self) -> str:
        given, text = (
            self.tokenizer.decode(self.context),
            self.tokenizer.decode(self.context + self.pending),
        )
        # a bad byte may spoil a character of the context, which was given already
        return (
            text.removeprefix(given)
            if text.startswith(given)
            else self.tokenizer.decode(self.pending)
        )

    def _give(self, text: str) -> str:
        # tokens without text are no context by themselves; special ones would have none in any
        # place
        self.context = (
            self.pending
            if text
            else self.context + [t for t in self.pending if t not in self.special]
        )
        self.pending = []
        return text


class TextStream:
    """The text of one output as its tokens arrive: whole characters, nothing past a stop string.

    What might be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.stream = tokenizer.stream(prompt)
        self.stops = StopMatcher(automaton_of(tuple(stops))) if stops else None
        self.stopped = False
        self._shown: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """All of the text so far, what is held back included."""
        return "".join((*self._shown, self._held))

    def append(self, token: int) -> None:
        """Add one token; `stopped` says whether it completed a stop string, which is then cut
        off."""
        before = len(self._held)
        piece = self.stream.append(token)
        self._held += piece
        at = self.stops.feed(piece) if self.stops else None
        if at is not None:
            self._held, self.stopped = self._held[: before + at], True

    def take(self, finished: bool) -> str:
        """The text that can be shown now and was not before."""
        if finished and not self.stopped:
            self._held += self.stream.flush()
        keep = self.stops.begun if self.stops and not finished else 0
        end = max(0, len(self._held) - keep)
        new, self._held = self._held[:end], self._held[end:]
        self._shown.append(new)
        return new


def _line(error: BaseException) -> str:
    """The first line of a library's message."""
    return one_line((str(error).strip() or repr(error)).splitlines()[0])
