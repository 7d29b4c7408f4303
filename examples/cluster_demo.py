"""Two replicas on this machine: each conversation stays with the replica that read its beginning.

    make cluster-demo

Starts `forerun deploy` with a file of its own, sends requests over HTTP, and ends it.
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
PERSONAS = (
    "a pirate who answers in verse",
    "a lawyer who answers in clauses",
    "a cook",
    "a sailor who is seasick",
)


def main() -> None:
    """Start the cluster, send requests, show which replica answered them, stop the cluster."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(PLAN)
        print("starting two replicas on Ray (about 20 s) ...")
        command = [sys.executable, "-m", "forerun", "deploy", str(file)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            address = wait_for_address(process)
            print(f"serving on {address}")
            show_conversations(address)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def wait_for_address(process: subprocess.Popen[str]) -> str:
    """Return the address when the cluster has started."""
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"serving replicas .* on (http://\S+)", line)
        if found:
            return found[1]
    raise SystemExit("".join(lines))


def show_conversations(address: str) -> None:
    """Send three turns of four conversations and print how many prompt tokens were cached."""
    for turn in range(3):
        for persona in PERSONAS:
            messages = [{"role": "system", "content": f"You are {persona}. " * 30}]
            messages += [
                {"role": "user", "content": f"Question {i} for {persona}"} for i in range(turn + 1)
            ]
            body = {"model": "small", "messages": messages, "max_tokens": 8}
            usage = post(f"{address}/v1/chat/completions", body)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            total = usage["prompt_tokens"]
            print(
                f"  turn {turn + 1}, {persona:32} {cached:4} of {total} prompt tokens were cached"
            )
    with urllib.request.urlopen(f"{address}/metrics") as response:
        page = response.read().decode()
    print("\nrequests of each replica:")
    for line in page.splitlines():
        if line.startswith("forerun_requests_total"):
            print(f"  {line}")


def post(url: str, body: dict[str, object]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the JSON answer to a JSON request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer: dict[str, dict[str, dict[str, int]]] = json.load(response)
    return answer


if __name__ == "__main__":
    main()
