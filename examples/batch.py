"""Many prompts at once, each with its own kind of draft, and what each draft was worth."""

from forerun import LLM, SamplingParams

llm = LLM()
prompts = [
    "def add(a, b):\n",
    "import os\n\n\ndef walk(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
]
params = SamplingParams(max_tokens=48, temperature=0.8, seed=7)
for draft in ("off", "ngram", "suffix"):
    completions = llm.generate(prompts, params, draft=draft)
    lengths = ", ".join(f"{c.stats.accepted_length:.2f}" for c in completions)
    print(
        f"{draft:7} tokens per pass: {lengths}   first line: {completions[0].text.partition(chr(10))[0]!r}"
    )
