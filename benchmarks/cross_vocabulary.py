"""Measure what another vocabulary costs a draft model.

    python -m benchmarks.cross_vocabulary --out twins   # an hour on 2 cores; later runs only
    measure

One small model is trained twice on texts of the default model, in the default model's tokens and in
those of a tokenizer trained on these texts; then the accepted lengths of both are measured. Both
start from the same layers of the default model; the embedding of a token that it does not have
starts as the mean of the tokens that spell it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn

from benchmarks.command import parser, run
from forerun import LLM, SamplingParams
from forerun.models.gguf.export import write_tokenizer
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer
from forerun.train.recipes.small_lm import prune
from forerun.train.synthesis import TOPICS

LAYERS, BATCH, TOKENS, HELD_OUT = 3, 8, 192, 12
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
REQUESTS = (
    *(
        "Begin.",
        "Give me an example.",
        "What should I know first?",
        "Tell me something surprising.",
    ),
    *("Explain it to me.", "Ask me a question and answer it.", "Make a list.", "Tell me more."),
    *("How does one start?", "What goes wrong most?", "Write a short one.", "Write a long one."),
    *("Why does it matter?", "Compare two of them.", "Give advice.", "Go on."),
)


def questions(count: int) -> list[list[dict[str, str]]]:
    """Return conversations; the first HELD_OUT of them are not repeated."""
    pairs = [(topic, request) for request in REQUESTS for topic in TOPICS if topic]
    random.Random(1).shuffle(pairs)
    pairs = pairs[:HELD_OUT] + list(islice(cycle(pairs[HELD_OUT:]), count - HELD_OUT))
    return [
        [{"role": "system", "content": topic}, {"role": "user", "content": request}]
        for topic, request in pairs
    ]


def training_texts(count: int, path: Path, tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return answers of the default model with their questions, generated once."""
    if path.exists():
        return list(json.loads(path.read_text()))
    llm = LLM(draft="suffix", max_rows=16, context=512)
    texts: list[str] = []
    for at in range(0, count, 16):
        params = SamplingParams.pure(max_tokens=160, temperature=0.8, seed=at)
        for c in llm.generate(questions(count)[at : at + 16], params):
            ids = [*c.prompt_token_ids, *c.token_ids]
            texts.append(tokenizer.decode(ids, skip_special_tokens=False))
        print(f"{len(texts)} of {count} texts", file=sys.stderr)
    path.write_text(json.dumps(texts))
    return texts


def other_tokenizer(texts: list[str], size: int) -> tokenizers.Tokenizer:
    """Train a SentencePiece-like BPE: spaces as letters, single bytes as a fallback."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL, *alphabet])
    made.train_from_iterator(texts, trainer)
    raw = json.loads(made.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in SPECIAL]
    return tokenizers.Tokenizer.from_str(json.dumps(raw))


def use_vocabulary(model: nn.Module, own: Tokenizer, other: tokenizers.Tokenizer) -> None:
    """Replace a model's embeddings by those of another vocabulary."""
    old = model.get_input_embeddings().weight.detach()
    rows = []
    for token in range(other.get_vocab_size()):
        if token < len(SPECIAL):
            text = other.id_to_token(token)
        else:
            text = other.decode([token], skip_special_tokens=False)
        ids = own.encode(text, special=False)
        rows.append(old[ids].mean(0) if ids else old.mean(0))
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
    model.config.bos_token_id = 1
    model.config.eos_token_id = 2
    model.config.pad_token_id = 0


def train(model: nn.Module, texts: list[list[int]], steps: int) -> None:
    """Train a model on token ids."""
    torch.set_num_threads(os.cpu_count() or 1)  # the native kernels leave torch one
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, total_steps=steps)
    rng = random.Random(2)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        sample = [torch.tensor(ids[:TOKENS]) for ids in rng.sample(texts, BATCH)]
        batch = nn.utils.rnn.pad_sequence(sample, batch_first=True, padding_value=-100)
        mask = (batch >= 0).long()
        loss = model(input_ids=batch.clamp_min(0), attention_mask=mask, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            seconds = time.monotonic() - begun
            print(f"step {step}: loss {loss.item():.2f}, {seconds:.0f} s", file=sys.stderr)


def make_models(out: Path, count: int, steps: int, size: int) -> None:
    """Write the models `same` and `other` unless they exist."""
    path = find_model(None)
    write_tokenizer(path, out)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    own = Tokenizer(path)
    texts = training_texts(count, out / "texts.json", tokenizer)[HELD_OUT:]
    for name in ("same", "other"):
        if (out / name).exists():
            continue
        model = prune(path, LAYERS)
        if name == "other":
            used = other_tokenizer(texts, size)
            use_vocabulary(model, own, used)
            ids = [used.encode(text).ids for text in texts]
        else:
            used = tokenizer
            ids = [own.encode(text, special=False) for text in texts]
        train(model, [line for line in ids if len(line) > 16], steps)
        model.save_pretrained(out / name)
        used.save(str(out / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (out / name / "tokenizer_config.json").write_text(json.dumps(settings))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, required=True, help="directory of texts and models")
    options.add_argument("--texts", type=int, default=600)
    options.add_argument("--steps", type=int, default=80)
    options.add_argument("--vocab", type=int, default=8000)
    given = options.parse_args(arguments)
    given.out.mkdir(exist_ok=True)
    make_models(given.out, given.texts, given.steps, given.vocab)
    for name in ("same", "other"):
        llm = LLM(draft=f"model:{given.out / name}")
        for temperature in (0.0, 0.8):
            params = SamplingParams.pure(max_tokens=120, temperature=temperature, seed=3)
            found = llm.generate(questions(HELD_OUT), params, depth=4)
            tokens = sum(len(c.token_ids) for c in found)
            passes = sum(len(c.token_ids) / c.stats.accepted_length for c in found)
            length = tokens / passes
            print(f"{name} vocabulary, temperature {temperature}: accepted length {length:.3f}")


if __name__ == "__main__":
    run(main)
