#!/usr/bin/env python3
"""What another vocabulary costs a draft model: one small model taught twice by the default model's
own texts, in the default model's tokens and in those of a tokenizer that was made for these texts,
and how much of each is accepted.

    python scripts/other_vocabulary.py --out twins   # writes texts, teaches both, measures: an hour
    on 2 cores python scripts/other_vocabulary.py --out twins   # measures again

Both begin as the same layers of the default model; a token that the default model does not have
begins as the mean of those that it is written in there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn

from forerun import LLM, SamplingParams
from forerun.models.gguf.export import write_tokenizer
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer
from forerun.train.recipes.small_lm import prune
from forerun.train.synthesis import TOPICS

LAYERS, BATCH, TOKENS, HELD_OUT = 3, 8, 192, 12


ASKED = (
    "Begin.", "Give me an example.", "What should I know first?", "Tell me something surprising.", "Explain it to me.",
    "Ask me a question and answer it.", "Make a list.", "Tell me more.", "How does one start?", "What goes wrong most?",
    "Write a short one.", "Write a long one.", "Why does it matter?", "Compare two of them.", "Give advice.", "Go on.",
)  # fmt: skip


def questions(count: int) -> list[list[dict[str, str]]]:
    pairs = [(topic, asked) for asked in ASKED for topic in TOPICS if topic]
    random.Random(1).shuffle(pairs)
    roles = "system", "user"
    pairs = pairs[:HELD_OUT] + list(islice(cycle(pairs[HELD_OUT:]), count - HELD_OUT))
    return [
        [{"role": r, "content": text} for r, text in zip(roles, pair, strict=True)]
        for pair in pairs
    ]


def written(count: int, place: Path, spelled: tokenizers.Tokenizer) -> list[str]:
    """Answers of the default model, each with its question before it as the model reads both."""
    if place.exists():
        return json.loads(place.read_text())
    llm = LLM(draft="suffix", max_rows=16, context=512)
    found = []
    for at in range(0, count, 16):
        some = llm.generate(
            questions(count)[at : at + 16],
            SamplingParams.pure(max_tokens=160, temperature=0.8, seed=at),
        )
        found += [
            spelled.decode([*c.prompt_token_ids, *c.token_ids], skip_special_tokens=False)
            for c in some
        ]
        print(f"{len(found)} of {count} texts", file=sys.stderr)
    place.write_text(json.dumps(found))
    return found


def other_tokenizer(texts: list[str], size: int) -> tokenizers.Tokenizer:
    """Pieces with spaces as letters and single bytes for the rest, as SentencePiece makes them."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special + alphabet)
    )
    raw = json.loads(made.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(raw))


def in_other_tokens(model: nn.Module, own: Tokenizer, other: tokenizers.Tokenizer) -> nn.Module:
    old = model.get_input_embeddings().weight.detach()
    rows = []
    for token in range(other.get_vocab_size()):
        text = (
            other.id_to_token(token)
            if token < 3
            else other.decode([token], skip_special_tokens=False)
        )
        ids = own.encode(text, special=False)
        rows.append(old[ids].mean(0) if ids else old.mean(0))
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 2, 0
    return model


def teach(model: nn.Module, texts: list[list[int]], steps: int) -> None:
    torch.set_num_threads(os.cpu_count() or 1)  # native kernels leave torch one
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-4, total_steps=steps)
    chance, begun = random.Random(2), time.monotonic()
    for step in range(steps):
        batch = nn.utils.rnn.pad_sequence(
            [torch.tensor(ids[:TOKENS]) for ids in chance.sample(texts, BATCH)],
            True,
            padding_value=-100,
        )
        loss = model(
            input_ids=batch.clamp_min(0), attention_mask=(batch >= 0).long(), labels=batch
        ).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % 20 == 19:
            print(
                f"step {step + 1}: loss {loss.item():.2f}, {time.monotonic() - begun:.0f} s",
                file=sys.stderr,
            )


def make(out: Path, count: int, steps: int, size: int) -> None:
    path = find_model(None)
    write_tokenizer(path, out)
    spelled, own = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")), Tokenizer(path)
    texts = written(count, out / "texts.json", spelled)[HELD_OUT:]
    for name in ("same", "other"):
        if (out / name).exists():
            continue
        model = prune(path, LAYERS)
        made = other_tokenizer(texts, size) if name == "other" else None
        model = in_other_tokens(model, own, made) if made else model
        ids = [made.encode(text).ids if made else own.encode(text, special=False) for text in texts]
        teach(model, [line for line in ids if len(line) > 16], steps)
        model.save_pretrained(out / name)
        (made or spelled).save(str(out / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (out / name / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--vocab", type=int, default=8000)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    make(args.out, args.texts, args.steps, args.vocab)
    for name in ("same", "other"):
        llm = LLM(draft=f"model:{args.out / name}")
        for temperature in (0.0, 0.8):
            params = SamplingParams.pure(max_tokens=120, temperature=temperature, seed=3)
            found = llm.generate(questions(HELD_OUT), params, depth=4)
            emitted = sum(len(c.token_ids) for c in found)
            passes = sum(len(c.token_ids) / c.stats.accepted_length for c in found)
            print(
                f"{name} vocabulary, temperature {temperature}: accepted length {emitted / passes:.3f}"
            )


if __name__ == "__main__":
    main()
