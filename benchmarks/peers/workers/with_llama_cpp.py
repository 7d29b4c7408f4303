"""Worker for llama.cpp, through the low-level interface of llama-cpp-python.

Speculation is the greedy loop of llama.cpp's own examples: a draft model with a context of its own
drafts a chain, one pass of the target verifies it, and rejected tokens are removed from both KV
caches. Several requests are sequences of one context, drafted and verified together. The KV cache
is float16, its default. Without a draft model, drafts are looked up in the text by the rule of its
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

    def begin(self, sequences: int) -> None:
        """Clear the KV cache of a context for this many sequences."""
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
        llama.llama_memory_clear(self.memory, False)

    def read(self, rows: Sequence[Row]) -> list[int]:
        """Return the most likely next tokens of the rows that want one, in order."""
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
        count = sum(row[3] for row in rows)
        if not count:
            return []
        logits = ctypes.cast(llama.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return [
            int(i) for i in np.ctypeslib.as_array(logits, (count, self.vocabulary)).argmax(axis=1)
        ]

    def keep(self, sequence: int, length: int) -> None:
        """Remove a sequence's KV cache from position `length` on."""
        llama.llama_memory_seq_rm(self.memory, sequence, length, -1)


class LlamaCpp:
    """A target and its draft model, converted to GGUF unless they are GGUF files."""

    plain = worker.MANY
    depths = True

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

    def run(self, depth: int, prompts: worker.Prompts, tokens: int) -> dict[str, Any]:
        """As `worker.Engine.run`."""
        texts = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + tokens for prompt in prompts]
        self.target.begin(len(prompts))
        # reads the prompts beforehand, as lookup does
        drafts: Lookup | Chains | None = Lookup(texts) if depth and not self.drafter else None
        watch = worker.Watch(len(prompts))
        for i, prompt in enumerate(prompts):
            last = len(prompt) - 1
            texts[i] += self.target.read(
                [(token, at, i, at == last) for at, token in enumerate(prompt)]
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
        self.model, self.texts, self.read = model, texts, [0] * len(texts)
        self.last: dict[
            int, tuple[int, list[int]]
        ] = {}  # the length of the text before, and the draft
        model.begin(len(texts))

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
