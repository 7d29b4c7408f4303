"""The native kernels agree with torch, and a row has the same bits whatever else is in the pass.

The second property makes speculative output equal plain output in every precision, near ties
included."""

import functools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest
from forerun.draft.suffix import Suffix
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.runtime import program
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import Linear, PackedMatrix
from forerun.runtime.program import release_buffers, visible_paths
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.verify import Noise
from tests import tiny
from tests.engine import build

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")

FORMS = ("float32", "bfloat16", "int8", "int4")
DRAFTERS = ["llama", "gemma2", "gpt2"]  # plain, with windows and softcap, with learned positions
NAMES = [*tiny.FAMILIES, *tiny.VARIANTS]


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    native.start(2)


@functools.cache
def decoder(name: str, form: str, draft: bool = False) -> NativeDecoder:
    native.start(2)
    directory = tiny.drafter(name) if draft else tiny.family(name)
    return NativeDecoder(load_config(directory), directory, form, 256)


def cache(model: NativeDecoder, tokens: int = 128, page: int = 4) -> KVCache:
    """Return a cache whose slot 1 has room for `tokens` tokens in pages that are not adjacent."""
    kv = KVCache(
        model.config,
        tokens=512,
        page=page,
        slots=3,
        context=256,
        dtype=model.dtype,
        device=model.device,
        native=True,
    )
    for upto in range(page, tokens + 1, page):
        for slot in (0, 1):
            kv.pages.grow(slot, upto)
    return kv


def ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(
        3, tiny.VOCAB, (count,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def test_buffers_of_a_long_pass_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a long prompt must not hold memory forever."""
    model, tokens = decoder("llama", "float32"), ids(100)
    first = model.forward([chain(tokens)], cache(model)).logits
    (buffers,) = {own.buffers for own in model._programs.values()}
    grown = buffers.arrays[program.LOGITS].nbytes
    monkeypatch.setattr(program, "KEPT_BYTES", 1 << 30)
    release_buffers()
    assert buffers.arrays[program.LOGITS].nbytes == grown  # below the limit
    monkeypatch.setattr(program, "KEPT_BYTES", 0)
    release_buffers()
    assert not buffers.arrays
    again = model.forward([chain(tokens[:1])], cache(model)).logits
    assert torch.equal(again[0], first[0])
    assert buffers.arrays[program.LOGITS].nbytes < grown


def chain(tokens: list[int]) -> Segment:
    return Segment.chain(1, tokens, range(len(tokens)))


def in_chunks(model: NativeDecoder, tokens: list[int], size: int) -> torch.Tensor:
    """Return the logits of a text that is read in passes of `size` tokens."""
    kv, rows = cache(model), []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        rows.append(model.forward([chain(part)], kv).logits)
        kv.commit(1, range(len(part)))
    return torch.cat(rows)


def path_to(node: int, parents: list[int]) -> list[int]:
    """Return the nodes from the root of a tree to a node."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_torch(name: str) -> None:
    model, reference = decoder(name, "float32"), Runner(
        tiny.decoder(tiny.family(name), torch.float32), tokens=256, page=4, slots=2
    )  # fmt: skip
    reference.cache.pages.grow(1, 60)
    kv, tokens = cache(model), ids(30)
    text = [chain(tokens)]
    actual, expected = model.forward(text, kv).logits, reference.forward(text).logits
    assert (actual - expected).abs().max() < 2e-4
    kv.commit(1, range(20))
    reference.cache.commit(1, range(20))
    tree = Segment(1, ids(6, 2), [-1, 0, 0, 1, 2, 4], list(range(6)))
    actual, expected = model.forward([tree], kv).logits, reference.forward([tree]).logits
    assert (actual - expected).abs().max() < 2e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_gives_the_bits_of_one_token_passes(name: str, form: str) -> None:
    model, tokens = decoder(name, form), ids(40)
    single = in_chunks(model, tokens, 1)
    for size in (40, 7):
        assert torch.equal(in_chunks(model, tokens, size), single)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt2"])
def test_a_tree_gives_the_bits_of_its_paths(name: str, form: str) -> None:
    """This holds beside another slot, too, and after a commit of a path that is not contiguous."""
    model, prompt = decoder(name, form), ids(21)
    kv = cache(model)
    model.forward([chain(prompt)], kv)
    kv.commit(1, range(21))
    tokens, parents = ids(12, 3), [-1, 0, 0, 1, 1, 2, 3, 6, 5, 7, 9, 2]
    other = Segment.chain(0, ids(5, 4), [4])
    logits = model.forward([other, Segment(1, tokens, parents, list(range(12)))], kv).logits[1:]
    for node in range(len(parents)):
        path = [tokens[i] for i in path_to(node, parents)]
        assert torch.equal(logits[node], in_chunks(model, prompt + path, 1)[-1])
    kv.commit(1, path_to(10, parents))
    after = model.forward([chain(ids(3, 5))], kv).logits
    kept = [tokens[i] for i in path_to(10, parents)]
    assert torch.equal(after, in_chunks(model, prompt + kept + ids(3, 5), 1)[-3:])


def test_a_tree_with_interleaved_branches_gives_the_bits_of_its_paths() -> None:
    """Nodes need not be ordered by level: keys of a group that a short path skips are read for a
    long one."""
    model, prompt = decoder("llama", "float32"), ids(64)
    kv = cache(model)
    model.forward([chain(prompt)], kv)
    kv.commit(1, range(64))
    # The root, a path of nine nodes (1 to 9), one of four (10 to 13), two more nodes so that the
    # kernel reads the rest together: the next node of either path, a sibling of node 5, its child.
    parents = [-1, *range(9), 0, 10, 11, 12, 0, 0, 9, 13, 4, 16]
    tokens = ids(len(parents), 3)
    logits = model.forward([Segment(1, tokens, parents, list(range(len(parents))))], kv).logits
    for node in range(len(parents)):
        path = [tokens[i] for i in path_to(node, parents)]
        assert torch.equal(logits[node], in_chunks(model, prompt + path, 1)[-1]), node


def test_a_forked_child_starts_its_own_threads() -> None:
    """Its parent's threads do not exist in the child, which must not wait for them."""
    model, tokens = decoder("llama", "int8"), ids(33)
    native.start(2)
    expected = model.forward([chain(tokens)], cache(model)).logits
    child = os.fork()
    if not child:
        signal.alarm(60)  # end the child if it hangs
        with suppress(BaseException):
            same = torch.equal(model.forward([chain(tokens)], cache(model)).logits, expected)
            native.start(3)
            same &= torch.equal(model.forward([chain(tokens)], cache(model)).logits, expected)
            os._exit(0 if same else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "instructions", ["amx", "avx512", "avx512vnni", "avxvnni", "avx2", "portable"]
)
@pytest.mark.parametrize("form", FORMS)
def test_all_instruction_sets_agree(instructions: str, form: str) -> None:
    """Values agree closely between instruction sets; within one, the bits of a row are invariant."""
    model, tokens = decoder("qwen3", form), ids(25)
    expected = model.forward([chain(tokens)], cache(model)).logits
    try:
        native.start(2, instructions)
    except ValueError:
        pytest.skip(f"this processor has no {instructions}")
    try:
        logits = model.forward([chain(tokens)], cache(model)).logits
        assert (logits - expected).abs().max() < (1e-3 if form == "float32" else 0.6)
        assert torch.equal(logits, in_chunks(model, tokens, 1))
    finally:
        native.start(2)


@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (96, 64), (70, 200), (256, 513)])
@pytest.mark.parametrize("form", FORMS)
def test_products_agree_with_float64_and_single_rows(form: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    x = torch.randn(64, shape[1])
    x[:, 0] *= 100  # an outlier channel, as real models have
    product = Linear(weight, form, bias)
    found = product(x)
    exact = x.double() @ weight.double().T + bias
    error = ((found - exact).norm() / exact.norm()).item()
    assert error < {"float32": 1e-6, "bfloat16": 6e-3, "int8": 2.5e-2, "int4": 0.12}[form]
    single = torch.cat([product(row[None]) for row in x])
    assert torch.equal(found, single)
    for count in (2, 3, 5, 8, 9, 12, 13, 16, 25):
        assert torch.equal(product(x[:count]), single[:count])


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_drafted_in_one_call_equal_those_drafted_level_by_level(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests have their own depths and temperatures, and pages that are not adjacent."""
    model = decoder(name, form, draft=True)
    depths, temperatures, lengths = (5, 1, 7, 4), (0.8, 0.0, 1.3, 0.0), (9, 30, 1, 14)
    drafts = []
    for in_one_call in (True, False):
        if not in_one_call:
            monkeypatch.setattr(Runner, "draft_chains", lambda *_: None)
        drafter = DraftModel(Runner(model, tokens=256, page=4, slots=4), tiny.VOCAB - 3)
        rows = [
            DraftRequest(
                slot,
                ids(length, slot),
                SamplingParams(temperature=temperature),
                Noise(slot, length - 1),
                depth,
            )
            for slot, (depth, temperature, length) in enumerate(
                zip(depths, temperatures, lengths, strict=True)
            )
        ]
        for round in range(3):
            for row in rows:
                if not round:
                    drafter.open(row.slot, row.tokens)
            drafts.append(drafter.propose(rows))
            rows = [
                replace(row, tokens=[*row.tokens, *draft.tokens[1:3], 5])
                for row, draft in zip(rows, drafts[-1], strict=True)
            ]
        drafter.runner.cache.pages.check()
    for native_drafts, expected in zip(drafts[:3], drafts[3:], strict=True):
        assert [len(draft) - 1 for draft in native_drafts] == list(depths)
        assert native_drafts == expected
        assert max(max(draft.tokens[1:]) for draft in native_drafts) < tiny.VOCAB - 3


def test_visible_paths() -> None:
    assert visible_paths([-1, 0, 1]) == [(1, []), (2, []), (3, [])]
    assert visible_paths([-1, 0, 0, 2, 1]) == [(1, []), (2, []), (1, [2]), (1, [2, 3]), (2, [4])]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_speculative_text_equals_plain_text(family: str, form: str, temperature: float) -> None:
    """With several requests, small chunks and preemption, tokens are equal in every precision."""
    outputs = {}
    for draft in ("off", "suffix", "tree"):
        small = Runner(decoder(family, "int8", draft=True), tokens=build.SMALL, page=4, slots=8)
        proposers = {"suffix": Suffix(shortest=1), "tree": DraftModel(small, tiny.VOCAB, width=3)}
        target = Runner(
            decoder(family, form), tokens=1024 if draft == "off" else build.SMALL, page=4, slots=8
        )
        engine = Engine(target, proposers, chunk=64 if draft == "off" else 5)
        requests = build.run(engine, draft, temperature)
        outputs[draft] = [list(r.output) for r in requests]
        assert draft == "off" or sum(r.stats.preemptions for r in requests) > 0
    assert outputs["suffix"] == outputs["off"]
    assert outputs["tree"] == outputs["off"]


MEMORY = """
import re, sys, torch
from pathlib import Path
from forerun import LLM, SamplingParams
from forerun.runtime.native import NativeDecoder
peak = lambda: 1024 * int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
llm = LLM(sys.argv[1], draft="off", quantization=sys.argv[2] or None, kv_tokens=256, context=128)
llm.generate([[5] * 60], SamplingParams.pure(max_tokens=4))
decoder = llm.decoder
assert isinstance(decoder, NativeDecoder)
print(peak() - before, decoder.weight_bytes + decoder.weights.embed.nbytes + llm.engine.target.cache.data.nbytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 200 MB of weights, in matrices of 8 to 47 MB."""
    directory = tmp_path_factory.mktemp("large")
    sizes = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, vocab_size=2048)
    model = tiny.hf_model(
        "llama", **sizes, num_attention_heads=16, num_key_value_heads=16, head_dim=128
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.one_in(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(
    "FORERUN_NATIVE" in os.environ, reason="a build with sanitizers needs memory of its own"
)
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_loading_takes_little_more_than_the_weights(
    large: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is never a second copy of the weights."""
    monkeypatch.setenv("FORERUN_CACHE", "off")
    command = [sys.executable, "-c", MEMORY, str(large), quantization]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    assert peak - held < 100e6, (peak, held)


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_page_size_does_not_change_the_bits(name: str, form: str) -> None:
    """Blocks of keys are read in place or gathered; tokens that see the same blocks share them."""
    model, prompt = decoder(name, form), ids(75)
    tree = Segment(1, ids(6, 2), [-1, 0, 0, 1, 2, 4], list(range(6)))
    found = []
    for page in (4, 8, 16, 32):
        kv = cache(model, page=page)
        first = model.forward([chain(prompt)], kv).logits
        kv.commit(1, range(75))
        found.append(torch.cat([first, model.forward([tree], kv).logits]))
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


def test_a_matrix_larger_than_a_slab_shares_it_with_no_other() -> None:
    """Freeing matrices behind it must not write into its values."""
    large = PackedMatrix(torch.ones(1100, 32 * 1024), None, "int8", gated=False)
    before = large.data.copy()
    small = [PackedMatrix(torch.ones(64, 64), None, "int8", gated=False) for _ in range(3)]
    del small
    assert np.array_equal(large.data, before)


@pytest.mark.parametrize("threads_", [1, 2, 3])
def test_threads_do_not_change_the_bits(threads_: int) -> None:
    model, tokens = decoder("llama", "int8"), ids(33)
    expected = model.forward([chain(tokens)], cache(model)).logits
    native.start(threads_)
    assert torch.equal(model.forward([chain(tokens)], cache(model)).logits, expected)
    native.start(2)


@pytest.mark.parametrize("form", FORMS)
def test_avx_vnni_computes_the_bits_of_avx2(form: str) -> None:
    """Sums of integers are exact in either instruction set, and all other code is shared."""
    model, tokens, logits = decoder("qwen3", form), ids(25), []
    try:
        for instructions in ("avx2", "avxvnni"):
            native.start(2, instructions)
            logits.append(model.forward([chain(tokens)], cache(model)).logits)
    except ValueError as error:
        pytest.skip(str(error))
    finally:
        native.start(2)
    assert torch.equal(*logits)


def test_outliers_do_not_drown_their_neighbours_in_int8() -> None:
    """An activation a hundred times as large as others reduces precision in its group of 64 only."""
    torch.manual_seed(3)
    weight, x = torch.randn(64, 512), torch.randn(4, 512)
    x[:, 7] = 100.0
    rest = weight.clone()
    rest[:, :64] = 0  # the contribution of the other groups
    exact = x.double() @ rest.double().T
    assert ((Linear(rest, "int8")(x) - exact).norm() / exact.norm()).item() < 0.012
