#!/usr/bin/env python3
"""Train the bundled models: a small decoder for Python code and a draft model distilled from it.

    python scripts/train_bundled.py all --out forerun/bundled --target-minutes 75 --draft-minutes 20

Corpus: the Python source of the standard library of the running interpreter (PSF licence), tests included,
data tables left out. One module in twenty, chosen by a hash of its path, is held out and never trained on.
Stages can be run one at a time (`tokenizer`, `target`, `draft`, `cards`); each writes an ordinary Hugging Face
directory. The learning rate follows the clock (warm-up, constant, linear to zero), so a run fits its time budget
on any machine; the seed fixes the order of the data, not the number of steps.
"""

import argparse
import copy
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCAB, CONTEXT = 4096, 1024
SHAPES = {
    "target": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=6),
    "draft": dict(hidden_size=256, intermediate_size=512, num_hidden_layers=1),
}


def corpus() -> tuple[list[str], list[str]]:
    """The source files of the standard library as (train, held out) texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "lib2to3/tests/data", "pydoc_data/", "encodings/cp", "encodings/mac")):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        letters = sum(c.isalpha() for c in text)
        if len(text) < 200 or letters < 0.4 * len(text.replace(" ", "")):  # tables of numbers teach nothing
            continue
        held = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        (held_out if held else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str], out: Path) -> None:
    """A byte-level BPE tokenizer, saved in `out`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False, model_max_length=CONTEXT
    )
    fast.save_pretrained(out)


def encode(texts: list[str], directory: Path) -> torch.Tensor:
    """All texts as one stream of token ids, each begun by the end-of-text token. int64 [T]"""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    end = tokenizer.eos_token_id
    ids = [i for text in texts for i in [end, *tokenizer.backend_tokenizer.encode(text).ids]]
    return torch.tensor(ids)


def build(role: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0, pad_token_id=None, rope_theta=10000.0,
        **SHAPES[role],
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(stream: torch.Tensor, rows: int, seed: int):
    """Random windows of CONTEXT + 1 tokens, without end. int64 [rows, CONTEXT + 1]"""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(stream) - CONTEXT - 1, (rows,), generator=generator)
        yield torch.stack([stream[s : s + CONTEXT + 1] for s in starts.tolist()])


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: torch.Tensor, windows: int = 64) -> float:
    """Perplexity over the first `windows` disjoint windows of the held-out stream."""
    total = 0.0
    windows = min(windows, (len(stream) - 1) // CONTEXT)
    for i in range(windows):
        ids = stream[i * CONTEXT : (i + 1) * CONTEXT + 1]
        logits = model(input_ids=ids[None, :-1]).logits[0]
        total += F.cross_entropy(logits.float(), ids[1:]).item()
    return math.exp(total / windows)


def distillation_loss(model, target, ids):
    """KL(target || draft) per token: the quantity whose decrease is acceptance."""
    with torch.no_grad():
        p = target(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    q = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    return F.kl_div(q.flatten(0, 1), p.flatten(0, 1), log_target=True, reduction="batchmean")


def next_token_loss(model, _target, ids):
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(role: str, out: Path, minutes: float, target: LlamaForCausalLM | None, rows: int = 4) -> dict:
    """Train one model for `minutes`, save it in bfloat16 under out/role and return what its card says."""
    torch.manual_seed(1)
    train_texts, held_texts = corpus()
    stream, held = encode(train_texts, out / "target"), encode(held_texts, out / "target")
    model = build(role)
    loss_of = distillation_loss if target else next_token_loss
    if target:  # the draft starts from the target's embeddings and first layer
        own = model.state_dict()
        source = target.state_dict()
        model.load_state_dict({k: source[k] if source[k].shape == v.shape else v for k, v in own.items()})
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1 or "embed" in n]
    optimizers = [
        (torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, nesterov=True), 0.02),
        (torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True), 3e-3),
    ]
    begin, step, seen, last = time.time(), 0, 0, time.time()
    for ids in batches(stream, rows, seed=7):
        elapsed = (time.time() - begin) / (60 * minutes)
        if elapsed >= 1:
            break
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 100, max(0.02, (1 - elapsed) / 0.6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, target, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, seen = step + 1, seen + ids.numel()
        if step % 50 == 0:
            speed = seen / (time.time() - begin)
            print(f"{role} step {step} {100 * elapsed:.0f}% loss {loss.item():.3f} {speed:.0f} tok/s", flush=True)
        if time.time() - last > 600:
            last = time.time()
            print(f"{role} held-out perplexity {perplexity(model, held, 16):.2f}", flush=True)
            save(model, out / role)
    save(model, out / role)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "train_tokens": len(stream), "seen_tokens": seen,
        "held_out_tokens": len(held), "held_out_perplexity": round(perplexity(model, held), 2), "minutes": minutes,
    }  # fmt: skip


def save(model: LlamaForCausalLM, directory: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)


CARD = """# forerun bundled {role}

A {shape} Llama-architecture decoder of {parameters:,} parameters for Python code, trained by
`scripts/train_bundled.py` ({stage}). It exists so that `forerun` can show and test speculation
without a download; it writes what looks like Python and knows nothing else.

- Data: the Python standard library's source (PSF licence), {train_tokens:,} tokens; it saw {seen_tokens:,}, with
  repetition. One module in twenty, chosen by a hash of its path, was held out ({held_out_tokens:,} tokens).
- Held-out perplexity per token (byte-level BPE, 4,096 tokens): **{held_out_perplexity}**.
- Trained for {minutes:g} minutes, bfloat16 autocast, Muon and AdamW, seed 1.
- Weights are bfloat16; context 1,024 tokens.
- Licence of the weights: Apache-2.0.
"""


def write_card(role: str, out: Path, facts: dict) -> None:
    shape = SHAPES[role]
    stage = "distilled from the bundled target with KL divergence" if role == "draft" else "next-token prediction"
    text = CARD.format(role=role, stage=stage, shape=f"{shape['num_hidden_layers']}-layer", **facts)
    (out / role / "README.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target", "draft", "all"])
    parser.add_argument("--out", type=Path, default=Path("forerun/bundled"))
    parser.add_argument("--target-minutes", type=float, default=75)
    parser.add_argument("--draft-minutes", type=float, default=20)
    args = parser.parse_args()
    if args.stage in ("tokenizer", "all"):
        train_tokenizer(corpus()[0], args.out / "target")
    if args.stage in ("target", "all"):
        facts = train("target", args.out, args.target_minutes, None)
        write_card("target", args.out, facts)
        print(json.dumps(facts), flush=True)
    if args.stage in ("draft", "all"):
        target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).eval()
        facts = train("draft", args.out, args.draft_minutes, target)
        write_card("draft", args.out, facts)
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
