"""Every native kernel agrees with float64 on odd shapes, in each instruction set available."""

from functools import partial

import numpy as np
import pytest
import torch

from forerun.kernels import native, reference
from forerun.runtime.packed import PackedMatrix

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled"),
    pytest.mark.usefixtures("instructions"),
]

RMS, LAYER = 1, 2


class Bench:
    """A program over buffers of random rows."""

    def __init__(self, widths: list[int], rows: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.widths = np.array(widths, dtype=np.int32)
        self.buffers = [self.rng.standard_normal((rows, w), dtype=np.float32) for w in widths]
        self.pointers = np.array([b.ctypes.data for b in self.buffers], dtype=np.uint64)
        bytes_ = rows * max(int(native.loaded().forerun_scratch_row_bytes(w)) for w in widths)
        self.scratch = np.zeros(bytes_ + 64, np.uint8)

    def run(self, *ops: native.COp, **batch: object) -> None:
        program = native.CProgram(
            ops=(native.COp * len(ops))(*ops),
            count=len(ops),
            buffers=len(self.widths),
            widths=self.widths.ctypes.data,
        )
        scratch = -(-self.scratch.ctypes.data // 64) * 64
        filled = native.CBatch(buffers=self.pointers.ctypes.data, scratch=scratch, **batch)
        native.loaded().forerun_run(program, filled)


def close(found: np.ndarray, exact: np.ndarray, tolerance: float) -> bool:
    return bool(np.abs(found - exact).max() <= tolerance * max(1.0, np.abs(exact).max()))


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "xielu"])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (37, 50), (130, 97)])
def test_a_linear_layer_with_norm_bias_activation_and_residual(
    inputs: int, outputs: int, activation: str
) -> None:
    for kind in (RMS, LAYER):
        bench = Bench([inputs, outputs], 5, seed=inputs)
        x, before = bench.buffers[0].astype(np.float64), bench.buffers[1].astype(np.float64)
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        gain, shift = np.random.rand(2, inputs).astype(np.float32)
        own_shift = shift.ctypes.data if kind == LAYER else None
        norm = native.CNorm(gain.ctypes.data, own_shift, 1e-5, kind)
        packed = PackedMatrix(weight, bias, "float32", gated=False)
        chosen = native.ACTIVATIONS[activation] if activation else 0
        curve = torch.tensor([0.7, 1.3, 0.5, -1e-6])
        op = native.COp(
            kind=native.LINEAR, input=0, output=1, norm=norm, matrix=packed.matrix, activation=chosen,
            combine=native.ADD, xielu=curve.data_ptr(),
        )  # fmt: skip
        bench.run(op, tokens=5)
        centred = x - x.mean(-1, keepdims=True) if kind == LAYER else x
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain + (
            shift if kind == LAYER else 0
        )
        y = torch.from_numpy(normed @ weight.double().numpy().T + bias.double().numpy())
        if activation == "silu":
            y = torch.nn.functional.silu(y)
        elif activation == "xielu":
            y = reference.xielu(y, *curve.double())
        elif activation:
            y = torch.nn.functional.gelu(
                y, approximate="tanh" if activation == "gelu_tanh" else "none"
            )
        assert close(bench.buffers[1], before + y.numpy(), 2e-5)


@pytest.mark.parametrize("inner", [16, 23, 48])
def test_a_gated_layer(inner: int) -> None:
    bench = Bench([40, inner + -inner % 16], 3, seed=inner)
    gate, up = torch.randn(inner, 40), torch.randn(inner, 40)
    packed = PackedMatrix(torch.cat((gate, up)), None, "float32", gated=True)
    silu = native.ACTIVATIONS["silu"]
    op = native.COp(kind=native.LINEAR, output=1, matrix=packed.matrix, gated=1, activation=silu)
    bench.run(op, tokens=3)
    x = torch.from_numpy(bench.buffers[0].astype(np.float64))
    exact = torch.nn.functional.silu(x @ gate.double().T) * (x @ up.double().T)
    assert close(bench.buffers[1][:, :inner], exact.numpy(), 2e-5)


def attention(q, keys, values, window, chunk, softcap, scale):  # type: ignore[no-untyped-def]
    """Attend with one token: q [heads, D]; visible keys and values in order [K, kv_heads, D]."""
    group = q.shape[0] // keys.shape[1]
    if chunk:
        keys, values = (t[(len(t) - 1) // chunk * chunk :] for t in (keys, values))
    keys, values = (np.repeat(t[-window:] if window else t, group, axis=1) for t in (keys, values))
    scores = np.einsum("hd,khd->hk", q, keys) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), values)


# heads, key heads, size of a head
SHAPES = [(1, 1, 8), (6, 2, 24), (3, 3, 64), (20, 1, 40), (8, 2, 128), (7, 1, 17)]
# window, chunk, softcap
MASKS = [(0, 0, 0.0), (5, 0, 0.0), (70, 0, 2.0), (0, 70, 0.0), (0, 75, 0.0), (5, 151, 0.0)]


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("scattered", [False, True])
def test_attention(form: str, scattered: bool) -> None:
    """A draft tree behind a long prefix, whose cache rows are in order or scattered. Rows that
    nobody sees hold NaN; a query that is NaN gives NaN, and leaves the others alone."""
    rows, prefix = 208, 150
    sees = [
        [*range(prefix)],
        [*range(prefix), 150],
        [*range(prefix), 150, 151],
        [*range(prefix), 150, 152],
        [*range(prefix), 150, 152, 153],
        [*range(3)],
    ]
    direct = np.array([150, 151, 152, 151, 151, 3], dtype=np.int32)
    extra_at = np.array([0, 0, 0, 0, 1, 3, 3], dtype=np.int32)
    for heads, kv_heads, dim in SHAPES:
        bench = Bench([(heads + 2 * kv_heads) * dim, heads * dim], 6, seed=dim)
        data = torch.from_numpy(
            bench.rng.standard_normal((2, rows, kv_heads, dim), dtype=np.float32)
        ).to(getattr(torch, form))
        line = np.arange(rows)
        if scattered:
            bench.rng.shuffle(line)
        extra = np.array([line[152], line[152], line[153]], dtype=np.int64)
        lines = np.full(6, line.ctypes.data, dtype=np.uint64)
        keys, values = data.double().numpy()
        for window, chunk, softcap in MASKS:
            seen_by_some = data.clone()
            seen_by_some[:, line[154:]] = np.nan
            if window == 5:
                seen_by_some[:, line[3 : prefix - 5]] = np.nan
            cache = native_layout(seen_by_some)
            attend = partial(
                bench.run,
                native.COp(
                    kind=native.ATTEND, input=0, output=1, scale=0.3, softcap=softcap, window=window, chunk=chunk,
                    heads=heads, kv_heads=kv_heads, head_dim=dim,
                ),
                tokens=6, rows=lines.ctypes.data, direct=direct.ctypes.data,
                extra_at=extra_at.ctypes.data, extra=extra.ctypes.data, keys=cache[0].data_ptr(), values=cache[1].data_ptr(),
                cache_rows=rows, kv_format=native.FORMATS[form],
            )  # fmt: skip
            attend()
            for token, seen in enumerate(sees):
                q = bench.buffers[0][token, : heads * dim].reshape(heads, dim).astype(np.float64)
                exact = attention(
                    q, keys[line[seen]], values[line[seen]], window, chunk, softcap, 0.3
                )
                found = bench.buffers[1][token].reshape(heads, dim)
                assert close(found, exact, 1e-5), (heads, kv_heads, dim, window, chunk, token)
        bench.buffers[0][0] = np.nan
        attend()
        assert np.isnan(bench.buffers[1][0]).all() and np.isfinite(bench.buffers[1][1:]).all()


def native_layout(data: torch.Tensor) -> torch.Tensor:
    """Return keys and values [2, rows, Hkv, D] in the native layout, each flat and padded for loads
    past the end."""
    _, rows, heads, dim = data.shape
    flat = torch.zeros(2, rows * heads * dim + 16, dtype=data.dtype)
    flat[0, :-16] = data[0].view(rows // 16, 16, heads, dim).permute(2, 0, 3, 1).flatten()
    flat[1, :-16] = data[1].transpose(0, 1).flatten()
    return flat


@pytest.mark.parametrize("rotary", [0, 6, 40])
def test_rotation_and_cache_writes(rotary: int) -> None:
    heads, kv_heads, dim, context = 3, 2, 40, 9
    bench = Bench([(heads + 2 * kv_heads) * dim], 2, seed=rotary)
    given = bench.buffers[0].astype(np.float64).reshape(2, heads + 2 * kv_heads, dim)
    angles = np.random.rand(context, max(rotary // 2, 1)).astype(np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)
    positions, store = np.array([4, 7], dtype=np.int64), np.array([1, 0], dtype=np.int64)
    data = torch.zeros(2, 16, kv_heads, dim)
    cache = native_layout(data)
    shape = dict(heads=heads, kv_heads=kv_heads, head_dim=dim)
    op = native.COp(kind=native.ROTATE, input=0, rotary=rotary, **shape)
    if rotary:
        op.cosine, op.sine = cosine.ctypes.data, sine.ctypes.data
    bench.run(
        op, tokens=2, positions=positions.ctypes.data, store=store.ctypes.data,
        keys=cache[0].data_ptr(), values=cache[1].data_ptr(), cache_rows=16, kv_format=0,
    )  # fmt: skip
    exact = given.copy()
    for t, position in enumerate(positions):
        half = rotary // 2
        c, s = cosine[position, :half].astype(np.float64), sine[position, :half].astype(np.float64)
        a, b = given[t, :-kv_heads, :half], given[t, :-kv_heads, half:rotary]
        exact[t, :-kv_heads, :half] = a * c - b * s
        exact[t, :-kv_heads, half:rotary] = b * c + a * s
    rotated = bench.buffers[0].reshape(exact.shape)
    assert close(rotated, exact, 1e-6)
    data[0, store], data[1, store] = (
        torch.from_numpy(rotated).float().split([heads, kv_heads, kv_heads], 1)[1:]
    )
    assert torch.equal(cache, native_layout(data))
