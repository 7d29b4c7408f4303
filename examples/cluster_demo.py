"""Two replicas on this machine: conversations stay where their beginning is known, and one replica
may die.

    make cluster-demo

Starts `forerun deploy` with a file of its own, asks it over HTTP, and ends it.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

PLAN = """
port = 0
shutdown_timeout = 5
[[models]]
name = "small"
replicas = 2
kv_tokens = 16384
"""
PEOPLE = (
    "a pirate who answers in verse",
    "a lawyer who answers in clauses",
    "a cook",
    "a sailor who is seasick",
)


def main() -> None:
    """Start, ask, show where the answers came from, end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(PLAN)
        print("starting two replicas on Ray (about 20 s) ...")
        command = [sys.executable, "-m", "forerun", "deploy", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            address = started(process)
            print(f"serving on {address}")
            show(address)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def started(process: subprocess.Popen[str]) -> str:
    """The address, once it is there."""
    said = []
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        found = re.search(r"serving replicas .* on (http://\S+)", line)
        if found:
            return found[1]
    raise SystemExit("".join(said))


def show(address: str) -> None:
    """Three rounds of four conversations with long beginnings, and what was reused of them."""
    for turn in range(3):
        for person in PEOPLE:
            system = f"You are {person}. " * 30
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Question {turn}"},
            ]
            usage = post(address, {"model": "small", "messages": messages, "max_tokens": 8})[
                "usage"
            ]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(
                f"  round {turn + 1}, {person:32} {cached:4} of {usage['prompt_tokens']} prompt tokens were there"
            )
    with urllib.request.urlopen(f"{address}/metrics") as response:
        page = response.read().decode()
    print("\nwhere they went, and why:")
    for line in page.splitlines():
        if line.startswith("forerun_routed_total"):
            print(f"  {line}")


def post(address: str, body: dict[str, object]) -> dict[str, dict[str, dict[str, int]]]:
    """The answer to a conversation."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, dict[str, dict[str, int]]] = json.load(response)
    return answer


if __name__ == "__main__":
    main()
