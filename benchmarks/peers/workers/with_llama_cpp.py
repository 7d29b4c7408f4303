"""Worker for llama.cpp, through the low-level interface of llama-cpp-python.

Speculation is the greedy loop of llama.cpp's own examples: a draft model with a context of its own
drafts a chain, one pass of the target verifies it, and rejected tokens are removed from both KV
caches. Above temperature 0 the draft stays greedy and the target's samplers decide, as in the
examples. Several requests are sequences of one context, drafted and verified together. The KV cache
is float16, its default, and keeps what the next run's prompt shares with the last text, as
llama.cpp's server does. Without a draft model, drafts are looked up in the text by the rule of its
example `lookup`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import worker
from ngram_cache import NgramCache

BATCH = 2048  # rows that one call takes
CELLS = 256  # a sequence's KV cache is a multiple of this
NEVER = -1  # no token: nothing is drawn behind a rejected draft
Row = tuple[int, int, int, bool]  # token, position, sequence, whether logits are wanted


class Model:
    """Weights, and a context for a number of sequences."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        settings = llama.llama_model_default_params()
        settings.n_gpu_layers = 0 if options["device"] == "cpu" else 1 << 10
        self.model = llama.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads, self.length = options["threads"], options["context"]
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.context: Any = None
        self.memory: Any = None
        self.sequences = 0
        self.held: list[list[int]] = []  # tokens of each sequence in the KV cache
        self.samplers: list[Any] = []  # of each sequence; empty for greedy decoding

    def begin(self, prompts: worker.Prompts, temperature: float = 0.0) -> list[int]:
        """Make sequences for these prompts; return how many tokens of each the KV cache has."""
        self._make_context(len(prompts))
        for sampler in self.samplers:
            llama.llama_sampler_free(sampler)
        self.samplers = [_sampler(temperature, i) for i in range(len(prompts)) if temperature]
        for i, prompt in enumerate(prompts):
            pairs = enumerate(zip(self.held[i], prompt[:-1], strict=False))
            most = min(len(self.held[i]), len(prompt) - 1)
            shared = next((at for at, (a, b) in pairs if a != b), most)
            if not self._cut(i, shared):
                self._cut(i, 0)  # the states of a recurrent model cannot go back
        return [len(held) for held in self.held]

    def _make_context(self, sequences: int) -> None:
        if sequences != self.sequences:
            if self.context:
                llama.llama_free(self.context)
            settings = llama.llama_context_default_params()
            settings.n_ctx = sequences * -(-self.length // CELLS) * CELLS
            settings.n_batch = BATCH
            settings.n_seq_max = self.sequences = sequences
            settings.n_threads = settings.n_threads_batch = self.threads
            settings.kv_unified = False  # the faster way for sequences that share nothing
            self.context = llama.llama_init_from_model(self.model, settings)
            if not self.context:
                raise MemoryError(f"llama.cpp cannot make a context for {sequences} sequences")
            self.memory = llama.llama_get_memory(self.context)
            self.held = [[] for _ in range(sequences)]

    def read(self, rows: Sequence[Row]) -> list[int]:
        """Return the next tokens, drawn or most likely, of the rows that want one, in order.

        No token is drawn behind a row that was followed by another token than the one drawn there.
        """
        found: list[int] = []
        for start in range(0, len(rows), BATCH):
            found += self._pass(rows[start : start + BATCH])
        return found

    def _pass(self, rows: Sequence[Row]) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = llama.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} rows")
        for token, position, sequence, _ in rows:
            self.held[sequence][position:] = [token]
        if self.samplers:
            return self._draw(rows)
        count = sum(row[3] for row in rows)
        if not count:
            return []
        logits = ctypes.cast(llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return [
            int(i) for i in np.ctypeslib.as_array(logits, (count, self.vocabulary)).argmax(axis=1)
        ]

    def _draw(self, rows: Sequence[Row]) -> list[int]:
        """Return what `read` does, so that random numbers are used as without a draft."""
        drawn: list[int] = []
        expected: dict[int, int] = {}  # token drawn last of each sequence
        for i, (token, _, sequence, wanted) in enumerate(rows):
            if wanted and expected.get(sequence, token) == token:
                sampler = self.samplers[sequence]
                drawn.append(llama.llama_sampler_sample(sampler, self.context, i))
            elif wanted:
                drawn.append(NEVER)
            if wanted:
                expected[sequence] = drawn[-1]
        return drawn

    def keep(self, sequence: int, length: int) -> None:
        """Remove a sequence's KV cache from position `length` on."""
        if not self._cut(sequence, length):
            raise RuntimeError("llama.cpp cannot take tokens back from this model's states")

    def _cut(self, sequence: int, length: int) -> bool:
        """Do what `keep` does; False if the model cannot."""
        if length < len(self.held[sequence]):
            if not llama.llama_memory_seq_rm(self.memory, sequence, length, -1):
                return False
            del self.held[sequence][length:]
        return True


def _sampler(temperature: float, seed: int) -> Any:
    """Return samplers that draw from the whole distribution at a temperature."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(temperature))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(seed))
    return chain


class LlamaCpp:
    """A target and its draft model, converted to GGUF unless they are GGUF files."""

    plain = worker.MANY
    depths = samples = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.version = llama.__version__
        llama.llama_backend_init()
        self.target = self._load(options["model"], options["format"], options)
        self.drafter = (
            self._load(options["draft"], options["draft_format"], options)
            if options["draft"]
            else None
        )
        self.speculative = worker.MANY if self.drafter or options["lookup"] else 0

    def _load(self, path: str, form: str, options: dict[str, Any]) -> Model:
        if Path(path).is_file():
            return Model(Path(path), options)
        from write_gguf import convert

        converted = worker.converted(options["converted"], path, f"{form}.gguf")
        convert(Path(path), form, converted)
        return Model(path, options)

    def run(
        self, depth: int, prompts: worker.Prompts, tokens: int, temperature: float
    ) -> dict[str, Any]:
        """As `worker.Engine.run`."""
        texts = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + tokens for prompt in prompts]
        known = self.target.begin(prompts, temperature)
        # reads the prompts beforehand, as lookup does
        drafts: Lookup | Chains | None = Lookup(texts) if depth and not self.drafter else None
        watch = worker.Watch(len(prompts))
        for i, prompt in enumerate(prompts):
            last = len(prompt) - 1
            texts[i] += self.target.read(
                [(prompt[at], at, i, at == last) for at in range(known[i], len(prompt))]
            )
            watch.step({i: 1})
        if depth and self.drafter:
            drafts = Chains(self.drafter, texts)
        while going := [i for i, text in enumerate(texts) if len(text) < ends[i]]:
            # the target gives a token of its own, so one less than is left need be drafted
            guesses = (
                drafts.draft({i: min(depth, ends[i] - len(texts[i]) - 1) for i in going})
                if drafts
                else {}
            )
            watch.step(self._judge(texts, going, guesses))
        outputs = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        answer: dict[str, Any] = watch.answer(outputs)
        return answer

    def _judge(
        self, texts: list[list[int]], going: list[int], guesses: dict[int, list[int]]
    ) -> dict[int, int]:
        """Verify drafts in one target pass and append accepted tokens; return how many."""
        rows = [
            (token, len(texts[i]) - 1 + at, i, True)
            for i in going
            for at, token in enumerate([texts[i][-1], *guesses.get(i, [])])
        ]
        choices, counts = iter(self.target.read(rows)), {}
        for i in going:
            guess = guesses.get(i, [])
            chosen = [next(choices) for _ in range(len(guess) + 1)]
            stands = next((at for at, token in enumerate(guess) if token != chosen[at]), len(guess))
            texts[i] += chosen[: stands + 1]
            counts[i] = stands + 1
            self.target.keep(i, len(texts[i]) - 1)
        return counts


class Lookup:
    """Drafts of one run that are looked up in the texts."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.caches = texts, [NgramCache() for _ in texts]
        for text, cache in zip(texts, self.caches, strict=True):
            cache.read(text)

    def draft(self, depths: dict[int, int]) -> dict[int, list[int]]:
        """Return drafts for {request: depth}."""
        for i in depths:
            self.caches[i].read(self.texts[i])
        return {i: self.caches[i].draft(self.texts[i], depth) for i, depth in depths.items()}


class Chains:
    """Drafts of one run from the draft model.

    `read` is the length of each text that is valid in the draft model's KV cache.
    """

    def __init__(self, model: Model, texts: list[list[int]]) -> None:
        self.model, self.texts, self.read = model, texts, model.begin(texts)
        self.last: dict[
            int, tuple[int, list[int]]
        ] = {}  # the length of the text before, and the draft

    def draft(self, depths: dict[int, int]) -> dict[int, list[int]]:
        """Return greedy drafts for {request: depth}; unread tokens are read first."""
        guesses: dict[int, list[int]] = {i: [] for i in depths}
        for level in range(max(depths.values())):
            rows: list[Row] = []
            for i in [i for i in depths if depths[i] > level]:
                start = len(self.texts[i]) + level - 1 if level else self._rewind(i)
                unread = guesses[i][-1:] if level else self.texts[i][start:]
                rows += [
                    (token, start + at, i, at == len(unread) - 1) for at, token in enumerate(unread)
                ]
            for row, token in zip(
                [row for row in rows if row[3]], self.model.read(rows), strict=True
            ):
                guesses[row[2]].append(token)
        self.last = {i: (len(self.texts[i]), guess) for i, guess in guesses.items() if guess}
        return guesses

    def _rewind(self, i: int) -> int:
        """Remove rejected tokens from the KV cache; return the length that stays valid."""
        if i in self.last:
            before, guess = self.last[i]
            stood = len(self.texts[i]) - 1 - before
            self.read[i] = before + min(stood, len(guess) - 1)  # the deepest guess was never read
            self.model.keep(i, self.read[i])
        return self.read[i]


if __name__ == "__main__":
    worker.work(LlamaCpp)
