"""Hostile model files: random mutations of model directories, which must load and work or be
refused in one line.

Run more of them with: python -m tests.hostile --count 5000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, RequestError
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from tests import quantise, tiny

TIME_LIMIT = 10.0  # seconds for each model
INTEGERS: list[Any] = [0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 10**400]
FLOATS: list[Any] = [0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf")]
TEXTS: list[Any] = ["", "x", "\ud800", "\x1b[2J\nx", "a" * 100_000, "../../etc/passwd", "llama"]
TEXTS += ["{{ 7 * 7 }}", "{% for"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [1] * 1000, ["a", 1, None]]
OTHERS += [{"a": {"b": []}}, {"": ""}, list(range(300))]
VALUES = INTEGERS + FLOATS + TEXTS + OTHERS
RAW = [
    b"", b"\0", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 100_000, b"1" * 5000, b'{"a":1,"a":2}',
    b'"\\ud800"', b"{}" * 3, b"NaN", b'{"model_type":"llama","model_type":"gpt2"}', b"version https://git-lfs\n",
]  # fmt: skip
JSON = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
JSON += ["model.safetensors.index.json"]
PLACES = ["../../etc/passwd", "/etc/passwd", "/dev/zero", ".", "", "\0", "a/../../b"]
PLACES += ["model.safetensors"]
RECOMMENDED = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"]
RECOMMENDED += ["do_sample"]
OPTIONS: Any = {"dtype": "float32", "max_rows": 2, "kv_tokens": 64, "context": 48, "threads": 1}
TEMPLATES = [
    "{% for m in messages %}", "{{", "{{ raise_exception('no') }}", "{{ messages[0].content }}", "(" * 50_000,
    "{{ " + "(" * 20_000, "\xff", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}", "{{ 'x' * 10 ** 12 }}",
]  # fmt: skip


def bases() -> list[Path]:
    """Return valid models: several families, with and without a tokenizer, sharded, quantised."""
    families = map(tiny.family, ("gpt2", "gemma3", "phi3", "smollm3"))
    quantised = map(_quantised, ("gptq", "awq", "packed"))
    return [tiny.with_tokenizer(), tiny.with_tokenizer(), _sharded(), *families, *quantised]


@cache
def _quantised(layout: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=f"{layout}-", dir=tiny._DIRECTORY.name)) / "model"
    quantise.checkpoint(directory, layout)
    return directory


@cache
def _sharded() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="shards-", dir=tiny._DIRECTORY.name))
    tiny.hf_model("llama").save_pretrained(directory, max_shard_size="20KB")
    return directory


NOT_APPLICABLE = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)


def mutate(directory: Path, rng: random.Random) -> str:
    """Change one thing in a directory and return a description; earlier mutations may make it
    impossible."""
    kinds = [*[_value] * 3, *[_bytes] * 2, *[_header] * 2, _special_file, _content, _new_file]
    mutation = rng.choice(kinds)
    try:
        file = rng.choice(_files(directory, "*"))
        return f"{mutation.__name__[1:]}: {mutation(directory, file, rng)}"
    except (*NOT_APPLICABLE, struct.error):
        return "nothing"


def _files(directory: Path, pattern: str) -> list[Path]:
    found = directory.glob(pattern)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _value(directory: Path, file: Path, rng: random.Random) -> str:
    """Change one value in a JSON file."""
    found = [path for path in _files(directory, "*.json") if path.name in JSON]
    file = rng.choice(found)
    raw = json.loads(file.read_text())
    places = list(_places(raw))
    holder, key = rng.choice(places)
    holder[key] = value = rng.choice(VALUES)
    file.write_bytes(json.dumps(raw).encode())
    return f"{file.name}: {key!r} is {repr(value)[:60]}"


def _places(raw: Any) -> Iterator[tuple[Any, Any]]:
    items: Any = raw.items() if isinstance(raw, dict) else ()
    if isinstance(raw, list):
        items = enumerate(raw)
    for key, value in items:
        yield raw, key
        yield from _places(value)


def _bytes(directory: Path, file: Path, rng: random.Random) -> str:
    """Flip, cut off, insert or double bytes."""
    data = bytearray(file.read_bytes())
    mutation = rng.choice(["flip", "cut", "insert", "twice"])
    if mutation == "flip":
        beginning = range(min(len(data), rng.choice((64, 4096, len(data)))))
        for at in rng.choices(beginning, k=rng.choice((1, 2, 9))):
            data[at] ^= 1 << rng.randrange(8)
    elif mutation == "cut":
        del data[rng.randrange(len(data)) :]
    elif mutation == "insert":
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.choice((1, 8, 1000)))
    else:
        data *= 2
    file.write_bytes(data)
    return f"{file.name}: {mutation}"


def _header(directory: Path, file: Path, rng: random.Random) -> str:
    """Change the header of a file of weights."""
    file = rng.choice(_files(directory, "*.safetensors"))
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    entry = header[one]
    sizes = [0, 1, 3, 2**40, -1, 2**64, 1.5]
    dtypes = ["F64", "F16", "I8", "BOOL", "F8_E4M3", "F4", "U64", "C64", "X", 3]
    offsets = [0, -1, 2**63, 2**64, 8, "x", None]

    def shape() -> list[Any]:
        return [rng.choice([*sizes, *entry["shape"]])] * rng.randrange(4)

    changes: dict[str, Callable[[], Any]] = {
        "shape": lambda: entry.update(shape=shape()),
        "turned": lambda: entry.update(shape=entry["shape"][::-1]),
        "dtype": lambda: entry.update(dtype=rng.choice(dtypes)),
        "overlap": lambda: entry.update(data_offsets=header[other]["data_offsets"]),
        "offsets": lambda: entry.update(data_offsets=[rng.choice(offsets) for _ in range(2)]),
        "gone": lambda: header.pop(one),
        "renamed": lambda: header.update({rng.choice(TEXTS): header.pop(one)}),
        "metadata": lambda: header.update(__metadata__=rng.choice(VALUES)),
        "any": lambda: entry.update({rng.choice([*entry, "x"]): rng.choice(VALUES)}),
    }
    what = rng.choice(list(changes))
    changes[what]()
    packed = json.dumps(header).encode()
    stated_length = rng.choice([len(packed)] * 9 + [0, 2**63, len(packed) + 1])
    file.write_bytes(struct.pack("<Q", stated_length) + packed + body)
    return f"{file.name}: {what} of {one}"


def _special_file(directory: Path, file: Path, rng: random.Random) -> str:
    """Replace a file by a pipe, a directory or a link, or remove it."""
    file.unlink()
    kind = rng.choice(["pipe", "directory", "loop", "zero", "text", "gone"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind != "gone":
        (directory / "secret").write_text("root:x:0:0:root:/root:/bin/bash\n")
        places = {"loop": file, "zero": Path("/dev/zero"), "text": directory / "secret"}
        file.symlink_to(places[kind])
    return f"{file.name}: {kind}"


def _content(directory: Path, file: Path, rng: random.Random) -> str:
    """Replace the content of a file."""
    others = [file.name, "chat_template.jinja", "special_tokens_map.json"]
    file = directory / rng.choice([*JSON, *others])
    file.unlink(missing_ok=True)  # do not write through a link
    file.write_bytes(content := rng.choice(RAW))
    return f"{file.name}: {content[:40]!r}"


def _new_file(directory: Path, file: Path, rng: random.Random) -> str:
    """Add a template, an index, recommended parameters, code or quantisation settings. Links are
    not written through."""
    if any(path.is_symlink() for path in directory.iterdir()):
        return "nothing"
    what = rng.choice(["template", "index", "recommended", "code", "quantisation"])
    if what == "template":
        (directory / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
    elif what == "index":
        index = json.dumps({"weight_map": {"a": rng.choice(PLACES)}})
        (directory / "model.safetensors.index.json").write_text(index)
    elif what == "recommended":
        settings = {"do_sample": True}
        settings |= {name: rng.choice(VALUES) for name in rng.sample(RECOMMENDED, 3)}
        (directory / "generation_config.json").write_text(json.dumps(settings))
    elif what == "code":
        (directory / "evil.py").write_text("raise SystemExit('code of a model was run')\n")
        auto = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}
        config = json.dumps({"auto_map": auto, "tokenizer_class": "Evil"})
        (directory / "tokenizer_config.json").write_text(config)
    else:
        raw = json.loads((directory / "config.json").read_text())
        method = {"quant_method": rng.choice(["gptq", "awq", "fp8", 7])}
        raw["quantization_config"] = rng.choice([*OTHERS, method])
        (directory / "config.json").write_text(json.dumps(raw))
    return what


def use(directory: Path, kernels: str = "torch") -> str:
    """Load a model and generate: return "fine", or the one line that says why it is refused."""
    try:
        llm = LLM(directory, kernels=kernels, draft="off", **OPTIONS)
        if llm.tokenizer:
            for prompt in ("a word", [{"role": "user", "content": "a word"}]):
                try:
                    llm.tokens(prompt)
                except RequestError as error:  # the request is refused, not the model
                    check_line(str(error))
        params = SamplingParams.pure(max_tokens=3, min_tokens=2, **llm.recommended)
        llm.generate([[3, 4, 5]], params)
    except ForerunError as error:
        check_line(str(error))
        return str(error)
    return "fine"


def check_line(text: str) -> None:
    """Assert that a message is one printable line."""
    assert text and "\n" not in text and "\x1b" not in text and len(text) < 900, repr(text[:2000])
    text.encode()


def run_mutations(count: int, seed: int, folder: Path) -> Counter[str]:
    """Load `count` mutated models; return how many were fine and how many were refused."""
    rng = random.Random(seed)
    outcomes = Counter[str]()
    originals = bases()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(count):
        directory = Path(shutil.copytree(rng.choice(originals), folder / "model"))
        what = " and ".join(mutate(directory, rng) for _ in range(rng.choice((1, 1, 1, 2))))
        start = time.monotonic()
        try:
            outcome = use(directory, rng.choice(("torch", "torch", "auto")))
        except BaseException as error:
            message = f"{i} ({what}): {type(error).__name__}: {str(error)[:300]}"
            raise AssertionError(message) from error
        seconds = time.monotonic() - start
        assert seconds < TIME_LIMIT, f"{i} ({what}) took {seconds:.1f} seconds"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        assert grown < 700, f"{i} ({what}) took {grown} MB"
        outcomes["fine" if outcome == "fine" else "refused"] += 1
        shutil.rmtree(directory)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(dict(run_mutations(arguments.count, arguments.seed, Path(scratch))))
