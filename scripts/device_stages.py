"""The stages of `device_check.py`: what they measure and compare, as rows of tables.

Each is a function that yields (name of a table, row). With `cpu` it works in miniature on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.roofline import pass_seconds, read_context
from forerun import rng
from forerun.bench.shapes import SHAPES, ModelShape, hugging_face_config
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.engine import Engine
from forerun.engine.multi_step import SECONDS
from forerun.hardware import cores, processor
from forerun.kernels import reference as kernels
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.measure.medians import first_difference
from forerun.measure.run import PLAIN, Arm, Run, Work, timed_run
from forerun.models.config import load_config
from forerun.models.decoder import Decoder
from forerun.models.parameters import LayerWeights, LinearWeights, Norm, Weights
from forerun.runtime.captured import CudaGraphs
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (name of a table, one of its rows)

TINY = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": 512,
}  # fmt: skip
MODELS = ("llama-3.2-1b", "llama-3.1-8b")
# names of how passes are recorded, for the tables; the last are not
RECORDINGS = (
    "graphs",
    "graphs, own kernels",
    "graphs, own kernels, int4",
    "graphs, one round a step",
    "",
)
# files of cases in tests/kernels/triton
KERNELS = (
    *("attention", "compact", "draw", "experts", "fused", "linear", "recurrent", "successors"),
    *("walk", "decoder", "rounds"),
)
RECIPES = ("medusa", "eagle3", "mtp", "block", "small-lm")
WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
COMPARED = 32  # rows of a batch that are compared with the same rows alone
AGREEMENT = 0.7  # of the drafter that knows the text
DEPTH = 4
PROMPT = 64  # tokens
BRANCH = 0.1  # size of a layer's output relative to the embedding: the successor stays likeliest
COUNTED_STEPS = 8  # steps whose operations and blocking calls are counted


def examine_card(cpu: bool) -> Rows:
    """Report the device, its bandwidth, its peak, and what a launch and a copy to the host cost."""
    device = device_of(cpu)

    def fact(name: str, value: object) -> tuple[str, Row]:
        return "card", {"fact": name, "value": value}

    yield fact("host", f"{processor()}, {cores()} cores, Python {platform.python_version()}")
    yield fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if not cpu:
        properties = torch.cuda.get_device_properties(device)
        yield fact("card", properties.name)
        yield fact("compute capability", f"{properties.major}.{properties.minor}")
        yield fact("multiprocessors", properties.multi_processor_count)
        yield fact("memory, GB", properties.total_memory / 1e9)
        if shutil.which("nvidia-smi"):
            query = "driver_version,clocks.max.sm,clocks.max.memory,power.limit"
            command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
            done = subprocess.run(command, capture_output=True, text=True)
            yield fact("driver, SM clock, memory clock, power limit", done.stdout.strip())
    yield fact("read bandwidth, GB/s", read_bandwidth(cpu) / 1e9)
    source = torch.randn(1 << (18 if cpu else 29), device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()
    seconds = seconds_of(lambda: target.copy_(source), device)
    yield fact("copy bandwidth (reads and writes), GB/s", copied / seconds / 1e9)
    size = 256 if cpu else 8192
    a, b = torch.randn((2, size, size), device=device).bfloat16()
    seconds = seconds_of(lambda: a @ b, device)
    yield fact(f"product of {size} x {size} in bfloat16, TFLOPS", 2 * size**3 / seconds / 1e12)
    small = torch.zeros(16, device=device)
    yield fact("launch of a small operation, µs", 1e6 * seconds_of(small.neg_, device, 200))
    began = time.perf_counter()
    for _ in range(200):
        small.cpu()
    yield fact("copy of 64 bytes to the host, µs", (time.perf_counter() - began) / 200 * 1e6)


def check_rows(cpu: bool) -> Rows:
    """Compare rows of products and of attention with the same rows alone, bit for bit."""
    device = device_of(cpu)
    counts = (2, 5) if cpu else (2, 4, 5, 8, 16, 17, 32, 64, 128, 512)
    few = [n for n in counts if n <= COMPARED]
    matmul = torch.backends.cuda.matmul
    settings = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)]
    for shape in shapes(cpu):
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "qkv": (queries + 2 * keys, shape.hidden),
            "out": (shape.hidden, queries),
            "up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
            "head": (shape.vocab, shape.hidden),
        }
        for part, (dtype, is_reduced) in itertools.product(sizes, settings):
            outputs, inputs = sizes[part]
            matmul.allow_bf16_reduced_precision_reduction = is_reduced
            weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
            x = torch.randn(max(counts), inputs, device=device, dtype=dtype)
            compared = x[:COMPARED].split(1)
            alone = torch.cat([kernels.linear(row, weight, None) for row in compared])
            together = {n: kernels.linear(x[:n], weight, None)[:COMPARED] for n in counts}
            name = str(dtype)[6:] + (", sums in bfloat16 allowed" if is_reduced else "")
            size = f"{outputs} x {inputs}"
            yield "products", {"part": part, "size": size, "dtype": name} | agree(alone, together)
        lengths = (40,) if cpu else (1000, 4000)
        for dtype, length in itertools.product((torch.bfloat16, torch.float32), lengths):
            name = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {length} keys"
            for what, found in compare_attention(shape, dtype, length, few, device):
                row = {"attention": what, "size": name, "dtype": str(dtype)[6:]}
                yield "attention", row | found


def compare_attention(
    shape: ModelShape, dtype: torch.dtype, length: int, counts: Sequence[int], device: torch.device
) -> Iterator[tuple[str, Row]]:
    """Compare drafts, and two requests, with plain decoding, as `cache.attention` attends."""
    most, scale = max(counts), shape.head_dim**-0.5
    q = torch.randn(1, most, shape.heads, shape.head_dim, device=device, dtype=dtype)
    kv = (2, 1, length + most, shape.kv_heads, shape.head_dim)
    k, v = torch.randn(kv, device=device, dtype=dtype)

    def attend(first: int, count: int, is_masked: bool) -> Tensor:
        """Return the rows of a part of a chain, each of which sees what is before it."""
        end = length + first + count
        mask = torch.ones(1, count, end, dtype=torch.bool, device=device).tril(end - count)
        queries, given = q[:, first : first + count], mask if is_masked else None
        return kernels.attention(queries, k[:, :end], v[:, :end], given, scale)[0]

    plain = torch.cat([attend(i, 1, False) for i in range(most)])
    one = torch.cat([attend(i, 1, True) for i in range(most)])
    drafts = {n: attend(0, n, True) for n in counts}
    yield "one row with a mask, and without", agree(plain, {1: one})
    yield "a draft, and plain decoding", agree(plain, drafts)
    yield "a draft, and one row with a mask", agree(one, drafts)
    rows = [most - 1, 0]  # of two requests in one call, the second of which is padded
    ends = torch.tensor([[length + i + 1] for i in rows], device=device)
    mask = (torch.arange(length + most, device=device) < ends)[:, None]
    both = [t.expand(2, -1, -1, -1) for t in (k, v)]
    found = kernels.attention(q[0, rows][:, None], *both, mask, scale)[:, 0]
    yield "two requests, and plain decoding", agree(plain[rows], {2: found})


def check_rows_workspace(cpu: bool) -> Rows:
    """Repeat `check_rows` with the cuBLAS workspaces that leave no room for splits of sums."""
    os.environ.update(WORKSPACE)  # read when CUDA starts, and this process has not started it
    yield from check_rows(cpu)


def check_noise(cpu: bool) -> Rows:
    """Compare the noise, and the tokens drawn with it, with those of the CPU."""
    device = device_of(cpu)
    rows, vocab = (4, 512) if cpu else (64, 128_256)
    keys = [rng.stream(i, rng.Lane.TARGET, 7) for i in range(rows)]
    tokens = torch.arange(rows * vocab)
    here = rng.gumbel(tokens.to(device) * 3, tokens.to(device)).cpu()
    there = rng.gumbel(tokens * 3, tokens)
    scores = torch.randn(rows, vocab)
    drawn = rng.gumbel_argmax(scores.to(device), keys).cpu()
    yield (
        "noise",
        {
            "numbers": len(tokens),
            "of other bits than on the CPU": int((here != there).sum()),
            "largest difference": float((here - there).abs().max()),
            "rows drawn": rows,
            "same tokens": int((drawn == rng.gumbel_argmax(scores, keys)).sum()),
        },
    )


def check_kernels(cpu: bool) -> Rows:
    """Compare Triton's kernels with their twins, each in a process of its own and all at once,
    since compiling takes longest; on a CPU two of them in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        yield "kernels", {"kernel": "", "result": "not run: the package triton is missing"}
        return
    names = ("successors", "walk") if cpu else KERNELS
    command = [sys.executable, "-m", "tests.kernels.triton.run", "interpreted" if cpu else "device"]
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running = {name: subprocess.Popen([*command, name], cwd=ROOT, **output) for name in names}
    failed = []
    for name, process in running.items():
        lines = process.communicate()[0].strip().splitlines()
        if process.returncode:
            failed.append(name)
            print("\n".join([name, *lines[-20:]]), file=sys.stderr)
        yield "kernels", {"kernel": name, "result": lines[-1]}
    if failed:
        raise RuntimeError(f"these kernels do not agree with their twins: {', '.join(failed)}")


def run_tests(cpu: bool) -> Rows:
    """Run the tests that need a CUDA device; on a CPU, collect them."""
    places = ["tests/test_llm.py"]
    options = ["-m", "cuda", "-p", "no:cacheprovider", "--tb=short"]
    if cpu:
        options += ["--collect-only"]
    else:
        places += ["tests/runtime/test_captured.py", "tests/models/test_parity.py"]
        places += ["tests/engine/test_device_steps.py", "tests/engine/test_lossless.py"]
        places += ["tests/cache/test_recurrent_devices.py"]
    if not cpu and importlib.util.find_spec("xdist"):
        options += ["-n", str(min(8, cores()))]
    command = [sys.executable, "-m", "pytest", *options, *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    yield "tests", {"command": "pytest " + " ".join(options[:2]), "result": lines[-1]}
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield "tests", {"command": "", "result": line}
    if done.returncode:
        print("\n".join(lines[-60:]), file=sys.stderr)
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: {lines[-1]}")


def certify(cpu: bool) -> Rows:
    """Run `forerun check` on a tiny random pair, in float32 and in bfloat16, with CUDA graphs and in
    bfloat16 also with Triton's kernels."""
    # Imported here, so that a package that is not installed fails this stage alone.
    from forerun.bench.pair import make_pair
    from forerun.bench.recipe import PairRecipe
    from forerun.cli.main import command_line

    failed = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder, "pair")
        sizes = TINY | {"draft_layers": 1, "context": 256, "prompts": 6, "prompt_tokens": 24}
        make_pair(pair, PairRecipe(**sizes, agree=0.0))  # an agreement that is not searched for
        scope = "--texts 1 --tokens 8 --samples 20 --rule match" if cpu else "--seconds 14"
        ways = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "triton")]
        for dtype, choice in [("float32", "torch")] if cpu else ways:
            words = f"{scope} --device {device_of(cpu)} --kernels {choice} --dtype {dtype} --json"
            command = ["check", f"{pair}/target", "--draft", f"model:{pair}/draft", *words.split()]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                command_line()(command, standalone_mode=False)
            report = json.loads(out.getvalue())
            for part in dict.fromkeys(f["part"] for f in report["findings"]):
                found = [f for f in report["findings"] if f["part"] == part]
                row: Row = {"dtype": dtype, "kernels": choice, "part": part, "checks": len(found)}
                row["passed"] = sum(f["passed"] is True for f in found)
                wrong = [f"{f['subject']}: {f['text']}" for f in found if not f["passed"]]
                if part != "faults" or dtype == "float32":
                    # In bfloat16 known faults can hide among the near ties that rounding excuses.
                    failed += wrong
                yield "certificate", row | {"not passed": "; ".join(wrong)}
    if failed:
        raise RuntimeError(f"{len(failed)} checks did not pass, the first: {failed[0]}")


def train_drafters(cpu: bool) -> Rows:
    """Train each kind of drafter for a tiny random model with `forerun train`; on a CPU one."""
    from forerun.cli.main import command_line
    from tests import tiny

    small = "--steps 6 --rows 3 --tokens 48 --prompt-tokens 8 --evaluate-rows 3 --depth 3"
    small += f" --held-out 0.3 --tasks none --speed-rounds 0 --device {device_of(cpu)} --json"
    with tempfile.TemporaryDirectory() as folder:
        texts = [
            json.dumps({"text": f'{{"name":"alpha {i}","sizes":[{i},{7 * i}]}}'}) for i in range(12)
        ]
        Path(folder, "data.jsonl").write_text("\n".join(texts))
        for recipe in RECIPES[:1] if cpu else RECIPES:
            command = [
                "train",
                "--target",
                str(tiny.with_tokenizer()),
                "--data",
                f"{folder}/data.jsonl",
            ]
            command += ["--recipe", recipe, "--out", f"{folder}/{recipe}", *small.split()]
            with contextlib.redirect_stdout(io.StringIO()) as out:
                command_line()(command, standalone_mode=False)
            report = json.loads(out.getvalue())
            losses = report["losses"]
            row: Row = {"recipe": recipe, "first loss": losses[0], "last loss": losses[-1]}
            yield "training", row


def measure_speed(cpu: bool) -> Rows:
    """Time passes, plain decoding and speculation of random models of published shapes."""
    for shape in shapes(cpu):
        for graphs in ("",) if cpu else RECORDINGS:
            try:
                yield from measure_model(shape, cpu, graphs)
            except torch.OutOfMemoryError:
                row = {"model": model_name(shape), "draft": "not run: too little memory"}
                yield "decoding", row


def measure_model(shape: ModelShape, cpu: bool, graphs: str) -> Rows:
    """Time passes, plain decoding and speculation of one random model, with its passes recorded as
    CUDA graphs or without."""
    name, bandwidth = model_name(shape), read_bandwidth(cpu)
    name += f", {graphs}" if graphs else ""
    packing = "int4" if "int4" in graphs else ""
    target = random_runner(shape, cpu, slots=1, graphs=graphs, packing=packing)
    for context in (64,) if cpu else (128, 4000):
        read_context(target, context, 64)
        counts = (1, 5) if cpu else (1, 5, 16, 32, 64)
        times = {n: median(pass_seconds(target, n) for _ in range(5)) for n in counts}
        for n, seconds in times.items():
            row: Row = {"model": name, "context": context, "rows": n, "ms": 1e3 * seconds}
            row["times one row"] = seconds / times[1]
            row["share of bandwidth"] = target.decoder.pass_bytes(n) / seconds / bandwidth
            yield "passes", row
        target.reset()
    small = replace(shape, layers=max(shape.layers // 8, 1))
    runner = random_runner(small, cpu, slots=1, graphs=graphs, packing=packing)
    draft = DraftModel(runner, shape.vocab)
    is_late = graphs and "one round" not in graphs
    proposers: dict[str, Proposer] = {"known": Known(shape.vocab), "model": draft}
    engine = Engine(target, proposers, multi_step=SECONDS if is_late else 0.0)
    arms = (PLAIN, *(Arm(name, DEPTH, proposer=name) for name in proposers))
    for temperature in (0.0, 0.8) if graphs == "graphs" or cpu else (0.0,):
        runs = {arm: decode(engine, 1, 8 if cpu else 128, temperature, arm) for arm in arms}
        plain = runs[PLAIN]
        for arm, run in runs.items():
            share = run.speed * target.decoder.pass_bytes() / bandwidth
            yield (
                "decoding",
                {
                    "model": name,
                    "draft": arm.draft if arm == PLAIN else f"{arm.draft}, depth {DEPTH}",
                    "temperature": temperature,
                    "tokens/s": run.speed,
                    "times plain": run.speed / plain.speed,
                    "share of bandwidth": share if arm == PLAIN else None,
                    "accepted length": run.accepted_length,
                    "draft ms": run.draft_ms,
                    "pass ms": run.pass_ms,
                    "other ms": run.other_ms,
                    **count_calls(engine, arm, temperature),
                    "differs from plain at": first_difference(run.outputs[0], plain.outputs[0]),
                },
            )


def measure_requests(cpu: bool) -> Rows:
    """Time several requests at once, plain and with the depth that the policy chooses."""
    shape = shapes(cpu)[0]
    counts = (1, 4) if cpu else (1, 4, 16, 64)
    target = random_runner(shape, cpu, slots=max(counts), graphs="" if cpu else "graphs")
    engine = Engine(target, {"known": Known(shape.vocab)}, multi_step=SECONDS)
    tokens = 8 if cpu else 64
    for count in counts:
        plain = decode(engine, count, tokens, 0.0, PLAIN)
        run = decode(engine, count, tokens, 0.0, Arm("known", "auto", proposer="known"))
        depths = [depth for stats in run.stats for depth in stats.depths]
        yield (
            "requests",
            {
                "model": model_name(shape),
                "requests": count,
                "plain, tokens/s": plain.speed,
                "speculative, tokens/s": run.speed,
                "times plain": run.speed / plain.speed,
                "mean depth": fmean(depths),
                "accepted length": run.accepted_length,
                "step ms": run.step_ms,
                "same texts": plain.outputs == run.outputs,
            },
        )


# ---------------------------------------------------------------- random models


class RandomDecoder(Decoder):
    """A Llama with random weights, made on the device, after whose token t comes token t + 1.

    The head scores a token by the embedding of the one before, and the layers add little to it."""

    def _load(self, path: Path, shortlist: Tensor | None) -> Weights:
        c = self.config

        def linear(weight: Tensor, form: str) -> LinearWeights:
            if form:
                return LinearWeights(DeviceMatrix.from_rounded(form, weight, self.dtype))
            return LinearWeights(weight)

        def matrix(outputs: int, inputs: int, size: float = 1.0) -> LinearWeights:
            weight = torch.randn(outputs, inputs, device=self.device, dtype=self.dtype)
            return linear(weight.mul_(size * inputs**-0.5), self.packing)

        def norm() -> Norm:
            return Norm(torch.ones(c.hidden, device=self.device))

        queries = c.heads * c.head_dim
        branch = BRANCH / c.layers**0.5
        layers = [
            LayerWeights(
                attention_norm=norm(),
                qkv=matrix(queries + 2 * c.kv_heads * c.head_dim, c.hidden),
                out=matrix(c.hidden, queries, branch),
                mlp_norm=norm(),
                up=matrix(2 * c.intermediate, c.hidden),
                down=matrix(c.hidden, c.intermediate, branch),
            )
            for _ in range(c.layers)
        ]
        embed = torch.randn(c.vocab, c.hidden, device=self.device, dtype=self.dtype)
        head = linear(embed.roll(1, 0), "int8" if self.packing else "")
        return Weights(embed, layers, norm(), head)


class Known(Proposer):
    """Drafts the true text of a `RandomDecoder` at no cost, each token with a chance of a mistake.

    Its acceptance is therefore known, and the same on every device."""

    name = "known"

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(request) for request in requests]

    def draft(self, request: DraftRequest) -> Draft:
        """Return a chain behind a request's tokens."""
        start, tokens = len(request.tokens), []
        for i in range(request.depth):
            key = rng.stream(request.slot, rng.Lane.DRAFT, start + i)
            mistake = rng.uniform(key) > AGREEMENT
            tokens.append((request.tokens[-1] + 1 + i + mistake) % self.vocab)
        return Draft.chain(request.tokens[-1], tokens, self.name)


def shapes(cpu: bool) -> list[ModelShape]:
    """Return the shapes to measure."""
    if cpu:
        return [ModelShape(**TINY, context=512)]
    names = {field.name for field in fields(ModelShape)}
    return [ModelShape(**{n: v for n, v in SHAPES[m].items() if n in names}) for m in MODELS]


def model_name(shape: ModelShape) -> str:
    """Return the name of a shape that is measured."""
    found = (name for name in MODELS if SHAPES[name]["hidden"] == shape.hidden)
    return next(found, "tiny")


def random_runner(
    shape: ModelShape, cpu: bool, slots: int, graphs: str, packing: str = ""
) -> Runner:
    """Make a random model with a KV cache; its passes are recorded as CUDA graphs with `graphs`,
    which is a name for the tables. `packing` as in `Decoder`, without "stored"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(hugging_face_config(shape)))
        config = load_config(path)
        decoder = RandomDecoder(
            config, path, torch.bfloat16, device_of(cpu), shape.context, packing=packing
        )
    tokens = max(shape.context, slots * 4 * PROMPT)
    own = "own" in graphs
    recorder = CudaGraphs(own_attention=own, own_layers=own) if graphs else None
    return Runner(decoder, tokens=tokens, page=16, slots=slots, graphs=recorder)


# ---------------------------------------------------------------- measuring


def device_of(cpu: bool) -> torch.device:
    """Return the device that is checked. On a CPU tiny tensors need no second thread."""
    if cpu:
        torch.set_num_threads(1)
    return torch.device("cpu" if cpu else "cuda")


def agree(alone: Tensor, together: dict[int, Tensor]) -> Row:
    """Return for which numbers of rows the rows are those of `alone`, bit for bit."""
    same = {n: torch.equal(rows, alone[: len(rows)]) for n, rows in together.items()}
    size = max(float((r - alone[: len(r)]).abs().max()) for r in together.values())
    return {
        "equal": all(same.values()),
        "equal for rows": [n for n, is_same in same.items() if is_same],
        "different for rows": [n for n, is_same in same.items() if not is_same],
        "largest difference": size,
    }


def seconds_of(work: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """Return the seconds of one call, the median of five series: by events on a GPU."""
    work()
    series = []
    for _ in range(5):
        if device.type == "cpu":
            began = time.perf_counter()
            for _ in range(calls):
                work()
            series.append((time.perf_counter() - began) / calls)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        series.append(start.elapsed_time(end) / 1e3 / calls)
    return median(series)


def read_bandwidth(cpu: bool) -> float:
    """Return the bytes per second at which a large tensor is summed."""
    data = torch.randn(1 << (18 if cpu else 30), device=device_of(cpu))
    return data.numel() * data.element_size() / seconds_of(data.sum, data.device)


def decode(engine: Engine, count: int, tokens: int, temperature: float, arm: Arm) -> Run:
    """Decode requests together, once to warm up and learn costs, then three times: the median."""
    works = [Work([(7 * i + j) % 500 for j in range(PROMPT)]) for i in range(count)]
    params = SamplingParams.pure(max_tokens=tokens, temperature=temperature, seed=1)
    runs = [timed_run(engine, works, params, arm) for _ in range(4)][1:]
    return sorted(runs, key=lambda run: run.speed)[1]


class CountOperations(TorchDispatchMode):
    """Counts torch operations."""

    operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.operations += 1
        return func(*args, **kwargs or {})


def count_calls(engine: Engine, arm: Arm, temperature: float) -> Row:
    """Return torch operations, and calls that block the host, of a round on average."""
    params = SamplingParams.pure(max_tokens=PROMPT, temperature=temperature, seed=1)
    request = engine.add(list(range(PROMPT)), params, draft=arm.name, depth=arm.depth)
    for _ in range(2):
        engine.step_or_raise()  # the prompt, and a first draft
    first = request.stats.steps
    is_cuda = engine.target.decoder.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught, CountOperations() as count:
        warnings.simplefilter("always")
        while engine.busy and request.stats.steps < first + COUNTED_STEPS:
            engine.step_or_raise()
    rounds = request.stats.steps - first
    if is_cuda:
        torch.cuda.set_sync_debug_mode("default")
    while engine.busy:
        engine.step_or_raise()
    blocking = sum("synchronizing CUDA" in str(warning.message) for warning in caught)
    return {
        "blocking calls a round": blocking / rounds if is_cuda else None,
        "operations a round": count.operations / rounds,
    }
