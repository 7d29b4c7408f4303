"""Four requests as people make them, each answered with speculation and without: the same tokens,
how much sooner.

    python examples/demo.py
    python examples/demo.py --model ollama:qwen3:0.6b --draft suffix

Both ways run in turn a few times, since the machine's speed drifts; medians are compared. What
finished requests said
is forgotten before each run: a text must not be drafted from its own repetition.
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun import LLM, Completion, Grammar, SamplingParams

ARTICLE = """The city council voted on Tuesday to replace all 4,200 street lamps with LED lights by the end of next
year. "The new lamps use sixty percent less power than the old ones," said Maria Lopez, who leads the public works
department. The project will cost 3.1 million dollars and is expected to pay for itself within six years. Residents of
the harbour district will see the first new lamps in March. Some astronomers had asked for warmer light, and the council
agreed to use lamps of 2,700 kelvin near the observatory. "We listened to those who look at the sky," said Lopez."""

CODE = '''```python
import json
from pathlib import Path


class Store:
    """Notes in a JSON file."""

    def __init__(self, path):
        self.path = Path(path)
        self.notes = {}

    def load(self):
        if self.path.exists():
            self.notes = json.loads(self.path.read_text())
        return self.notes

    def save(self):
        self.path.write_text(json.dumps(self.notes, indent=2))

    def add(self, name, text):
        self.notes[name] = text
        self.save()

    def remove(self, name):
        self.notes.pop(name, None)
        self.save()

    def find(self, word):
        return [name for name, text in self.notes.items() if word in text]
```'''

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 40},
        "languages": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 3,
            "maxItems": 3,
        },
    },
    "required": ["name", "city", "languages"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Demand:
    """One request: what it shows, what is asked, and what is known of the answer."""

    name: str
    asked: str
    max_tokens: int = 200
    prediction: str | None = None
    grammar: Grammar | None = None

    def run(self, llm: LLM, draft: str | None) -> Completion:
        """The whole answer."""
        return llm.generate(self._prompt, self._params, draft=draft, prediction=self.prediction)[0]

    def show(self, llm: LLM, console: Console) -> None:
        """The answer as it comes, accepted drafted tokens in colour."""
        console.rule(f"[bold]{self.name}[/bold]", align="left")
        console.print(Text(self.asked.split("\n")[0], style="dim"))
        for event in llm.stream(self._prompt, self._params, prediction=self.prediction):
            for piece, source in zip(event.pieces, event.sources, strict=True):
                console.print(Text(piece, style="cyan" if source else ""), end="")
        console.print("\n")

    @property
    def _prompt(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.asked}]

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, grammar=self.grammar)


DEMANDS = [
    Demand("chat", "Why is the sky blue? Explain it to a child.", max_tokens=120),
    Demand(
        "edit a file",
        f"Add a docstring to the method `save` of this file. Write the whole file again, and nothing else.\n\n{CODE}",
        max_tokens=300, prediction=CODE,
    ),
    Demand("summary", f"Summarize this article in a few sentences. Quote what Maria Lopez said.\n\n{ARTICLE}"),
    Demand(
        "JSON by schema",
        "Anna Keller lives in Paris and speaks German, French and English. Give her name, city and languages as JSON.",
        grammar=Grammar.of("json_schema", PERSON),
    ),
]  # fmt: skip


def decoding_speed(completion: Completion) -> float:
    """Tokens a second after the first pass, which reads the prompt."""
    stats = completion.stats
    return (stats.completion_tokens - 1) / (stats.seconds - stats.first_token_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file, a directory, ollama:NAME or a Hub id")
    parser.add_argument(
        "--draft", default="auto", help="what drafts, as in forerun generate --help"
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    console = Console(highlight=False, soft_wrap=True)
    llm = LLM(args.model, draft=args.draft)
    table = Table("request", "tokens", "plain/s", "drafting/s", "times", "accepted", "same")
    same_everywhere = True
    for demand in DEMANDS:
        demand.show(llm, console)  # it also warms up, and lets the depth policy measure
        plain, speculative = [], []
        for _ in range(args.repeats):
            plain.append(demand.run(llm, "off"))
            llm.forget()
            speculative.append(demand.run(llm, None))
            llm.forget()
        slow, fast = (statistics.median(map(decoding_speed, runs)) for runs in (plain, speculative))
        same = all(run.token_ids == plain[0].token_ids for run in [*plain, *speculative])
        same_everywhere &= same
        accepted = statistics.median(run.stats.accepted_length for run in speculative)
        table.add_row(
            demand.name, str(len(plain[0].token_ids)), f"{slow:.0f}", f"{fast:.0f}", f"{fast / slow:.2f}",
            f"{accepted:.2f}", "yes" if same else "[red]NO[/red]",
        )  # fmt: skip
    console.print(table)
    console.print(
        "tokens a second, plain and with speculation; accepted: tokens per pass of the target, 1 without it"
    )
    console.print(
        f"{llm.draft} drafts (drafted and accepted is coloured above); weights {llm.decoder.precision}\n"
    )
    console.print("Chat with it:         .venv/bin/forerun chat")
    console.print(
        'With your own model:  .venv/bin/forerun generate "Hello" --model FILE.gguf (ollama:NAME, a Hub id)'
    )
    raise SystemExit(0 if same_everywhere else 1)


if __name__ == "__main__":
    main()
