"""Made-up reports, in the shape that measurements give them."""

from __future__ import annotations

import random
from typing import Any

CATEGORIES = (
    "completion",
    "edit",
    "grounded",
    "summary",
    "translation",
    "chat",
    "mathematics",
    "free",
)
DRAFTS = (
    "suffix",
    "ngram",
    "model:pair/draft",
    "reference+suffix",
    "suffix+model:pair/draft",
    "auto",
)
MACHINE = {
    "processor": "AMD EPYC 9B14", "cores": 2, "instructions": "AVX-512, VNNI, BF16", "threads": 2, "torch": "2.12.0",
    "forerun": "0.1.0", "device": "cpu",
}  # fmt: skip


def result(seed: int = 0, **fields: Any) -> dict[str, Any]:
    """One result with plausible numbers: a draft as good as its category and luck let it be."""
    chance = random.Random(repr((seed, sorted(fields.items()))))
    draft = fields.get("draft", "suffix")
    passes = 400
    if draft == "off":
        luck, times, levels, lengths = 0.0, 1.0, 0, [passes]
    else:
        luck, levels = chance.uniform(0.2, 0.85), 7
        lengths = [round(passes * luck**i * (1 - luck)) for i in range(levels)] + [
            round(passes * luck**levels)
        ]
        times = 0.8 * sum((i + 1) * n for i, n in enumerate(lengths)) / sum(lengths)
    tokens = sum((i + 1) * n for i, n in enumerate(lengths))
    drafted = 6 * passes if levels else 0
    reached = [sum(lengths[i + 1 :]) for i in range(levels)]
    return {
        "quantization": "none", "draft": draft, "depth": 0 if draft == "off" else "auto", "rule": "match",
        "category": "edit", "temperature": 0.0, "requests": 1, "tokens_per_second": 41.0 * times, "times_plain": times,
        "interval": None if draft == "off" else [0.94 * times, 1.05 * times], "accepted_length": tokens / passes,
        "drafted": drafted / passes, "draft_ms": 1.9 * bool(levels), "pass_ms": 24.0 + levels / 2, "other_ms": 0.4,
        "same": True, "first_difference": None, "lengths": lengths, "acceptance": [[passes, n] for n in reached],
        "sources": {name: [drafted // 2, round(drafted * luck / 2)] for name in draft.split("+")} if levels else {},
        "positions": [[start, passes / 4, tokens / 4 + start / 3 * luck] for start in (0, 64, 128, 192)],
        "joules_per_token": None, "cost_per_million": None,
    } | fields  # fmt: skip


def report(results: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A report of these results, with a limit for each kind of weights."""
    weights = dict.fromkeys(r["quantization"] for r in results)
    return {
        "kind": "decode", "model": "pair/target", "tokens": 256, "repeats": 5, "machine": MACHINE, "results": results,
        "limits": [
            {
                "quantization": name, "weight_bytes": 574_000_000 >> i, "bandwidth": 21.4,
                "tokens_per_second": 37.3 * 2**i, "share": 0.91,
            }
            for i, name in enumerate(weights)
        ],
    } | fields  # fmt: skip


def large(**fields: Any) -> dict[str, Any]:
    """Everything at once: two kinds of weights, 8 categories, 6 drafts, energy and cost. 112
    results."""
    return report([
        result(
            quantization=weights, category=category, draft=draft, joules_per_token=0.4 + i / 9,
            cost_per_million=1.5 - i / 9, **fields,
        )
        for weights in ("none", "int8") for category in CATEGORIES for i, draft in enumerate(("off", *DRAFTS))
    ])  # fmt: skip
