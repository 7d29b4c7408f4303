"""Programs of native operations with their buffers: a pass, chains of passes, a drafter's whole
round in one call."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.hardware import give_back
from forerun.kernels import native
from forerun.kernels.native import CBatch, CChain, CMatrix, COp, CProgram, address
from forerun.kernels.native.layout import interleave, lay_out
from forerun.models.config import ModelConfig
from forerun.models.gguf.blocks import FLOATS, FORMS, TYPE_IDS, Blocks, floats, no_numbers
from forerun.models.gguf.container import open_gguf
from forerun.models.packed_cache import Broken, Kept, PackedCache
from forerun.models.quantized import Exact, Stored
from forerun.models.weights import Matrix, Source
from forerun.types import BESIDE


class Pass:
    """One pass over segments."""

    def __init__(self, segments: Sequence[Segment], cache: KVCache, causal: bool = True) -> None:
        """`causal`: a token sees its ancestors, otherwise all that is not committed of its slot."""
        table = cache.pages.rows
        ids: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        direct: list[int] = []
        extra: list[int] = []
        extra_at: list[int] = [0]
        want: list[int] = []
        store: list[int] = []
        for s in segments:
            at = cache.length[s.slot]
            want += [len(ids) + i for i in s.want]
            ids += s.tokens
            lines += [cache.pages.lines[s.slot]] * len(s.tokens)
            store += table[s.slot, at + s.offset : at + len(s.parents)].tolist()
            for straight, path in _sights(s.parents)[s.offset :]:
                positions.append(at + straight + len(path) - 1)
                direct.append(at + (straight if causal else len(s.parents)))
                extra += [int(table[s.slot, at + i]) for i in path] if causal else []
                extra_at.append(len(extra))
        self.tokens, self.wanted = len(ids), len(want)
        self.ids, self.positions, self.store = (
            array("q", ids),
            array("q", positions),
            array("q", store),
        )
        self.lines, self.direct = array("Q", lines), array("i", direct)
        self.extra, self.extra_at, self.want = (
            array("q", extra),
            array("i", extra_at),
            array("q", want),
        )

    def fill(self, pointers: int, scratch: int, cache: KVCache) -> CBatch:
        """The C structure; it points into this object and the cache."""
        keys, values, stride, dtype = cache.layout
        return CBatch(
            tokens=self.tokens, wanted=self.wanted, ids=address(self.ids), positions=address(self.positions),
            store=address(self.store), rows=address(self.lines), direct=address(self.direct),
            extra_at=address(self.extra_at), extra=address(self.extra), want=address(self.want), buffers=pointers,
            scratch=scratch, keys=keys, values=values, layer_stride=stride, kv_format=native.FORMATS[dtype],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """Where a chain of drafted tokens begins in one slot.

    Attributes:
        token: the one to read first, `offset` rows behind what is committed; those between have
            been read.
        temperature: 0 says the likeliest token.
        keys: streams of noise, one for each token that is to be said.
        floor: the chance that all that was said stands, below which no more is; 0 never stops.
    """

    slot: int
    token: int
    offset: int
    temperature: float
    keys: Sequence[int]
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """What was said behind one link, or a start.

    Attributes:
        tokens: one behind the other.
        sure: how sure the drafter was of each, in sixteenths; empty where that was not asked.
        beside: in place of each, the tokens it thought likeliest next to it: (token, sixteenth).
    """

    tokens: list[int]
    sure: list[int] = field(default_factory=list)
    beside: list[list[tuple[int, int]]] = field(default_factory=list)


class Draws:
    """What is to be said behind links, level by level, and what was; the longest links come first.

    Attributes:
        links: as they stand here. order: their numbers as they were given.
        active [levels]: how many of them say something in a level.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        counts = [len(link.keys) for link in links]
        self.order = sorted(range(len(links)), key=lambda i: -counts[i])
        self.links = links = [links[i] for i in self.order]
        self._most = [counts[i] for i in self.order]
        self.levels, self.rows = max(counts), len(links)
        self.active = array("i", [sum(n > level for n in counts) for level in range(self.levels)])
        self.temperature = array("f", [link.temperature for link in links])
        self.keys = array("Q", _by_level([link.keys for link in links]))
        self.tokens = array(
            "q", [*(link.token for link in links), *[0] * (self.levels * len(links))]
        )
        self.floors, self.counts = (
            array("f", [link.floor for link in links]),
            array("i", self._most),
        )
        self._weighed = False

    def weigh(self) -> None:
        """Make room for what the drafter thinks of what it says."""
        count, self._weighed = len(self.tokens), True
        self.sure, self.beside_sure = array("b", bytes(count)), array("b", bytes(BESIDE * count))
        self.beside = array("q", bytes(8 * BESIDE * count))

    def said(self, begun: bool = False) -> list[Said]:
        """What was said behind each link, in the order in which they were given; `begun`: its token
        was said too."""
        found = [Said([])] * self.rows
        for column, i in enumerate(self.order):
            first, last = 0 if begun else 1, min(self._most[column], self.counts[column])
            places = range(column, len(self.tokens), self.rows)[first : last + 1]
            tokens = self.tokens[places.start : places.stop : self.rows].tolist()
            if self._weighed:
                weights = [self.sure[at] for at in places], [self._beside(at) for at in places]
                found[i] = Said(tokens, *weights)
            else:
                found[i] = Said(tokens)
        return found

    def _beside(self, at: int) -> list[tuple[int, int]]:
        own = slice(BESIDE * at, BESIDE * (at + 1))
        return [
            pair
            for pair in zip(self.beside[own], self.beside_sure[own], strict=True)
            if pair[0] >= 0
        ]


class Steps(Pass):
    """Passes one behind the other, of one token for each link that has not ended."""

    def __init__(self, draws: Draws, cache: KVCache) -> None:
        links, self.tokens, self.wanted = draws.links, draws.rows, draws.rows
        starts = [cache.length[link.slot] + link.offset for link in links]
        positions = [start + level for level in range(draws.levels) for start in starts]
        self.positions, self.direct = (
            array("q", positions),
            array("i", [at + 1 for at in positions]),
        )
        lines = [
            cache.pages.rows[x.slot, at : at + draws.levels].tolist()
            for x, at in zip(links, starts, strict=True)
        ]
        self.store = array("q", _by_level(lines))
        self.lines = array("Q", [cache.pages.lines[link.slot] for link in links])
        self.want, self.extra = array("q", range(len(links))), array("q")
        self.extra_at, self.ids = (
            array("i", [0] * (len(links) + 1)),
            array("q", [link.token for link in links]),
        )


def _by_level(lines: Sequence[Sequence[int]]) -> list[int]:
    """The first number of every line, then the second, with zeros where a line has ended: no link
    goes on there."""
    return list(chain.from_iterable(zip_longest(*lines, fillvalue=0)))


def _sights(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each uncommitted token, the path it sees, itself last: how many of the first tokens in a
    row, and which further ones."""
    sights: list[tuple[int, list[int]]] = []
    for i, parent in enumerate(parents):
        straight, path = sights[parent] if parent >= 0 else (0, [])
        sights.append(
            (straight + 1, path) if not path and straight == i else (straight, [*path, i])
        )
    return sights


BLOCK = 32
AT_ONCE = 1 << 16  # floats of a block of rows that are converted together, or one block
LARGE = 1 << 20  # bytes of a matrix whose temporaries are felt
PART = 1 << 21  # bytes of a file that are repacked together
ROUNDED = ("int8", "int4")


class Packed:
    """A linear layer in the kernels' layout, in memory of its own."""

    _memory = 0

    def __init__(
        self, weight: Tensor | Exact | Kept | Blocks, bias: Tensor | None, form: str, gated: bool
    ) -> None:
        """weight [out, in]: floats, what `form` holds exactly, or a copy from the cache (may raise
        Broken). `gated` interleaves gate and up by 16 rows, so that one block holds both. Raises
        LoadError for a broken file."""
        lib = native.loaded()
        outputs, inputs = weight.shape
        if gated:
            outputs, bias = (
                -(-outputs // 32) * 32,
                None if bias is None else interleave(bias.float()),
            )
        padded = int(lib.forerun_padded_inputs(inputs))
        rows = -(-outputs // BLOCK) * BLOCK
        size, scales = (
            int(f(native.FORMATS[form], rows, padded))
            for f in (lib.forerun_bytes, lib.forerun_scales)
        )
        self._lib, self._memory = lib, native.allocate(size)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._memory))
        self.scale = np.zeros(max(scales, 4), np.uint8).view(SCALES.get(form, np.uint8))
        self.rows, self.bias = rows, None if bias is None else np.zeros(rows, dtype=np.float32)
        if bias is not None and self.bias is not None:
            self.bias[:outputs] = bias.float().numpy()
        self.form, self.bytes = form, size + scales
        self.matrix = CMatrix(
            self._memory, self.scale.ctypes.data, None if self.bias is None else self.bias.ctypes.data,
            native.FORMATS[form], inputs, outputs, padded,
        )  # fmt: skip
        self._fill(weight, gated, padded)
        if size >= LARGE:
            give_back()

    def _fill(self, weight: Tensor | Exact | Kept | Blocks, gated: bool, padded: int) -> None:
        if isinstance(weight, Kept):
            weight.fill(self.data, self.scale)
        elif isinstance(weight, Exact):
            integers = (interleave(t) if gated else t for t in (weight.values, weight.scale))
            data, scale = lay_out(self.form, self.rows, padded, *integers)
            self.data[:], self.scale[:] = data.numpy(), scale.numpy().view(self.scale.dtype)
        elif isinstance(weight, Tensor):
            self._pack(weight.shape, lambda at, count: weight[at : at + count], gated, padded)
        elif weight.kind in FLOATS:
            self._pack(
                weight.shape,
                lambda at, count: floats(weight.kind, weight.read(at, count)),
                gated,
                padded,
            )
        else:
            self._repack(weight, gated)

    def _pack(
        self, shape: Sequence[int], read: Callable[[int, int], Tensor], gated: bool, padded: int
    ) -> None:
        """Round and lay out floats, some rows at a time: a float32 copy of a large matrix would be
        felt."""
        halves = 2 if gated else 1
        rows, step = shape[0] // halves, max(AT_ONCE // (4 * padded), 1) * BLOCK
        each, sizes = len(self.data) // self.rows, self.scale.nbytes // self.rows
        for at in range(0, rows, step):
            part = torch.cat(
                [read(half * rows + at, min(step, rows - at)) for half in range(halves)]
            ).float()
            given, first = (interleave(part) if gated else part).contiguous(), at * halves
            self._lib.forerun_pack(
                native.FORMATS[self.form], given.data_ptr(), len(given), shape[1],
                self._memory + first * each, self.scale.ctypes.data + first * sizes,
            )  # fmt: skip

    def _repack(self, blocks: Blocks, gated: bool) -> None:
        """Lay out the integers of a file and their scales as they are, on as many threads as passes
        have."""
        halves = 2 if gated else 1
        rows, each = blocks.shape[0] // halves, blocks.pieces[0].entry.row_bytes
        step = max(PART // each // BLOCK, 1) * BLOCK // halves
        data, scale = (len(a.view(np.uint8)) // self.rows for a in (self.data, self.scale))

        def run(at: int) -> None:
            parts = [blocks.read(half * rows + at, min(step, rows - at)) for half in range(halves)]
            given = [_addresses(part, 16 if gated else 1) for part in parts]
            taken = (
                np.ascontiguousarray(np.stack(given, axis=1)).ravel() if gated else given[0].ravel()
            )
            if not self._lib.forerun_repack(
                TYPE_IDS[blocks.kind], native.FORMATS[self.form], taken.ctypes.data, len(taken), blocks.shape[1],
                self._memory + at * halves * data, self.scale.ctypes.data + at * halves * scale,
            ):  # fmt: skip
                raise no_numbers(blocks.pieces[0].entry)

        starts = range(0, rows, step)
        if len(starts) == 1:
            return run(0)
        with ThreadPoolExecutor(native.threads()) as pool:
            list(pool.map(run, starts))
        return None

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Rows as floats, of a matrix that is not interleaved. rows [...] int64 -> float32 [...,
        in]"""
        index = rows.to(torch.int64).contiguous()
        out = torch.empty(*index.shape, self.matrix.inputs)
        self._lib.forerun_unpack(
            ctypes.byref(self.matrix), index.data_ptr(), index.numel(), out.data_ptr()
        )
        return out

    def __del__(self) -> None:
        if self._memory:
            self._lib.forerun_release(self._memory)


SCALES = {"int8": np.float32, "int4": np.uint16}  # others are of more than one kind


def _addresses(rows: np.ndarray, multiple: int) -> np.ndarray:
    """Where rows of bytes begin, filled up with nulls. -> uint64 [n, multiple]"""
    found = np.zeros(-(-len(rows) // multiple) * multiple, np.uint64)
    found[: len(rows)] = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(
        rows.strides[0]
    )
    return found.reshape(-1, multiple)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices that a linear layer is made of: where in a row its outputs begin, and
    whether it is what lets the next one through."""

    packed: Packed
    column: int = 0
    gate: bool = False
    gated: bool = False


class Mixed:
    """A linear layer whose rows are stored in several types: a matrix for each."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)


def parts_of(layer: Packed | Mixed) -> tuple[Part, ...]:
    """The matrices of a linear layer."""
    return layer.parts if isinstance(layer, Mixed) else (Part(layer),)


def pack(
    source: Source, bias: Tensor | None, form: str, keep: bool, gated: bool, cache: PackedCache
) -> Packed | Mixed:
    """A linear layer from the cache, or as it is stored where that is allowed and possible, or
    rounded to `form`."""
    kept = cache.find(source.name, source.shape)
    if kept is not None:
        try:
            packed = Packed(kept, bias, kept.form, gated)
        except Broken:
            cache.tell_broken()
        else:
            cache.keep(source.name, kept.form, source.shape, (packed.data, packed.scale), new=False)
            return packed
    held = source.read()
    if stays(held, form, keep):
        return pack_blocks(held, bias, gated)
    exact = held.exact() if isinstance(held, Stored) else None
    chosen = "int8" if source.name == "head" and form == "int4" else form
    if exact is not None and (keep or exact.form == form):
        packed = Packed(exact, bias, exact.form, gated)
    elif (
        isinstance(held, Blocks)
        and held.kind == "Q4_0" == held.alike()[-1].kind
        and chosen == "int4"
    ):
        packed = Packed(held, bias, chosen, gated)
    else:
        packed = Packed(
            held if isinstance(held, Tensor) else held.dequantise(), bias, chosen, gated
        )
    if packed.form in ROUNDED:
        cache.keep(source.name, packed.form, source.shape, (packed.data, packed.scale))
    return packed


def stays(held: Matrix, form: str, keep: bool) -> TypeGuard[Blocks]:
    """Whether a matrix of a GGUF file is left in its numbers: where it may be, unless floats are to
    be rounded."""
    return keep and isinstance(held, Blocks) and not (form in ROUNDED and held.kind in FLOATS)


def pack_blocks(blocks: Blocks, bias: Tensor | None, gated: bool) -> Packed | Mixed:
    """A linear layer in the numbers of its file; in bfloat16 where no native format holds them."""
    same = blocks.alike()
    if len(same) == 1:
        return _as_stored(blocks, bias, gated)
    made, column = [], 0
    for i, part in enumerate(same):
        rows = part.shape[0]
        own = None if bias is None else bias[column : column + rows]
        made.append(
            Part(
                _as_stored(part, own, False),
                0 if gated else column,
                gated and i == 0,
                gated and i == 1,
            )
        )
        column += rows
    return Mixed(made)


def _as_stored(blocks: Blocks, bias: Tensor | None, gated: bool) -> Packed:
    form = blocks.form
    return (
        Packed(blocks, bias, form, gated)
        if form
        else Packed(blocks.dequantise(), bias, "bfloat16", gated)
    )


def say_what_is_rounded(path: Path) -> None:
    """One line on stderr if a GGUF file has types that no native format holds."""
    kinds = Counter(
        entry.kind for entry in open_gguf(path).tensors.values() if len(entry.shape) == 2
    )
    rounded = [f"{count} in {kind}" for kind, count in kinds.items() if kind not in FORMS]
    if rounded:
        print(
            f"note: matrices that run in bfloat16, since no native format holds them: {', '.join(rounded)}",
            file=sys.stderr,
        )


def embed_op(
    table: Tensor | Packed, output: int, scale: float, positions: int | None = None
) -> COp:
    """The operation that writes rows of an embedding to a buffer; a dense one [V, H] is float32 or
    bfloat16."""
    if isinstance(table, Packed):
        return COp(
            kind=native.EMBED, output=output, scale=scale, positions=positions, matrix=table.matrix
        )
    return COp(
        kind=native.EMBED, output=output, scale=scale, positions=positions, table=table.data_ptr(),
        matrix=CMatrix(inputs=table.shape[1], format=0 if table.dtype == torch.float32 else 1),
    )  # fmt: skip


def fingerprint() -> str:
    """What the packing code makes of a fixed matrix: another layout or another rounding gives
    another one."""
    probe = (torch.arange(90 * 200) * 7919 % 1009 - 504).view(90, 200) / 300
    digest = hashlib.sha256()
    for form in ROUNDED:
        packed = Packed(probe, None, form, gated=True)
        digest.update(packed.data.tobytes() + packed.scale.tobytes())
    return digest.hexdigest()


def all_packed(layers: Iterable[Packed | Mixed]) -> list[Packed]:
    """Every matrix of some linear layers."""
    return [part.packed for layer in layers for part in parts_of(layer)]


class Linear:
    """x [T, in] times weight [out, in] transposed; on the native kernels no row depends on another,
    to the last bit."""

    def __init__(self, weight: Tensor, form: str | None, bias: Tensor | None = None) -> None:
        """`form` is float32, bfloat16, int8 or int4 on the native kernels; None computes on torch
        in float32. `bias` [out] is added."""
        bias = None if bias is None else bias.detach().float()
        self.outputs, self.form = weight.shape[0], form
        if form is None:
            self.weight, self.bias = weight.float(), bias
        else:
            self._multiply_with(Packed(weight, bias, form, gated=False))

    @classmethod
    def of(cls, packed: Packed) -> Linear:
        """A layer that is packed already; its memory is shared."""
        linear = cls.__new__(cls)
        linear.outputs, linear.form = packed.matrix.outputs, packed.form
        linear._multiply_with(packed)
        return linear

    def _multiply_with(self, packed: Packed) -> None:
        self.packed, inputs = packed, packed.matrix.inputs
        self._widths = np.array([inputs, self.outputs], dtype=np.int32)
        self._op = (COp * 1)(COp(kind=native.LINEAR, input=0, output=1, matrix=packed.matrix))
        self._program = native.CProgram(
            ops=self._op, count=1, buffers=2, widths=self._widths.ctypes.data
        )
        self._row_bytes = int(native.loaded().forerun_scratch_row_bytes(inputs))

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, in] -> float32 [T, out]"""
        if self.form is None:
            return F.linear(x.float(), self.weight, self.bias)
        given, out = x.float().contiguous(), torch.empty(len(x), self.outputs)
        pointers = np.array([given.data_ptr(), out.data_ptr()], dtype=np.uint64)
        scratch = np.empty(len(x) * self._row_bytes + 64, np.uint8)
        batch = native.CBatch(
            tokens=len(x), buffers=pointers.ctypes.data, scratch=-(-scratch.ctypes.data // 64) * 64
        )
        native.loaded().forerun_run(self._program, batch)
        return out


X, QKV, ATTENDED, HIDDEN, BRANCH, LOGITS = range(6)  # buffers
ROOM = 64  # tokens that buffers have room for at first; they grow


class Recorded:
    """A program and its buffers."""

    def __init__(self, c: ModelConfig, ops: list[COp], widths: np.ndarray) -> None:
        self.ops, self.widths = (COp * len(ops))(*ops), widths  # kept: the program points to both
        self.program = CProgram(
            ops=self.ops, count=len(ops), buffers=len(widths), heads=c.heads, kv_heads=c.kv_heads,
            head_dim=c.head_dim, layers=c.layers, widths=widths.ctypes.data,
        )  # fmt: skip
        row_bytes = native.loaded().forerun_scratch_row_bytes
        self.buffers = _Buffers(
            widths, max(int(row_bytes(int(w))) for i, w in enumerate(widths) if i != LOGITS)
        )

    def chain(
        self,
        links: Sequence[Link],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None = None,
        given: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> list[list[int]]:
        """Say token after token behind each link, below `vocab`: the program has a pass over one
        token a link and its logits. `ids` [Vd] int64 are the tokens that these are of, if not the
        first. `given`: what buffers begin with, a row for each link."""
        draws = Draws(links)
        pointers, scratch = self.buffers.fit(len(links), len(links))
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: len(links)] = rows[draws.order]
        steps = Steps(draws, cache)
        batch = steps.fill(pointers, scratch, cache)
        native.loaded().forerun_chain(self.program, batch, _chain(draws, vocab, ids))
        return [said.tokens for said in draws.said()]

    def round(
        self,
        starts: Sequence[Start],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        state: int,
        begin: Recorded,
        given: Sequence[int],
        stands: array[float] | None,
    ) -> tuple[list[Said], np.ndarray]:
        """Read what each start brings, and say token after token behind it: the same in one call.
        What was read is not committed. `state` is the buffer of what each token is paired with.
        `begin` is the program of the first pass, with the same buffers, of which `given` take what
        the starts bring. With `stands` chains end as their links' floors say, and what is said is
        weighed. Also what the layers left of each start's last token, [starts, H]."""
        draws = Draws([start.link for start in starts])
        ordered = [starts[i] for i in draws.order]
        first = Pass([start.segment for start in ordered], cache)
        pointers, scratch = self.buffers.fit(first.tokens, len(starts))
        self._bring(ordered, given, first.tokens)
        keys, last = array("Q", [start.key for start in ordered]), array("i", first.want.tolist())
        steps = Steps(draws, cache)
        reads, batch = first.fill(pointers, scratch, cache), steps.fill(pointers, scratch, cache)
        chain = _chain(draws, vocab, ids, stands)
        chain.state, chain.begin = state, ctypes.pointer(begin.program)
        chain.first, chain.last = ctypes.pointer(reads), address(last)
        left = np.empty((len(starts), int(self.widths[X])), np.float32)
        chain.first_keys, chain.left = address(keys), left.ctypes.data
        native.loaded().forerun_chain(self.program, batch, chain)
        return draws.said(begun=True), left[np.argsort(draws.order)]

    def block(
        self,
        starts: Sequence[Start],
        slots: Callable[[Start], Segment],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        first: int,
        begin: Recorded,
        given: Sequence[int],
        follow: Recorded | None,
        stands: array[float] | None,
    ) -> list[Said]:
        """Read what each start brings, and say all tokens behind it from one pass over the `slots`
        of its block, which
        see one another, in one call: slot `first` says the first of them. What
        `follow` adds to logits for the token before comes before each draw. Otherwise as in
        `round`."""
        draws = Draws([start.link for start in starts])
        ordered = [starts[i] for i in draws.order]
        blocks = Pass([slots(start) for start in ordered], cache, False)
        size = blocks.tokens // draws.rows
        saying = (
            (level, row) for level in range(draws.levels) for row in range(draws.active[level])
        )
        blocks.want = array("q", [row * size + first + level for level, row in saying])
        blocks.wanted = len(blocks.want)
        bringing = [start for start in ordered if start.segment.tokens]
        reads = Pass([start.segment for start in bringing], cache)
        pointers, scratch = self.buffers.fit(max(reads.tokens, blocks.tokens), blocks.wanted)
        self._bring(bringing, given, reads.tokens)
        chain, context = _chain(draws, vocab, ids, stands), reads.fill(pointers, scratch, cache)
        if bringing:
            chain.begin, chain.first = ctypes.pointer(begin.program), ctypes.pointer(context)
        batch = blocks.fill(pointers, scratch, cache)
        programs = _programs([follow] * draws.levels) if follow else None
        native.loaded().forerun_block(self.program, batch, programs, chain)
        return draws.said()

    def levels(
        self,
        links: Sequence[Link],
        follow: Sequence[Recorded],
        given: Mapping[int, np.ndarray],
        vocab: int,
        ids: np.ndarray | None,
        stands: array[float] | None,
    ) -> list[Said]:
        """Say token after token behind each link, in one call: this program, then for each level
        its own of `follow`, which makes logits with the token of the level before. Buffers begin
        with `given`, rows [links, at most the buffer's width]; there is no cache. Otherwise as in
        `round`."""
        draws = Draws(links)
        pointers, scratch = self.buffers.fit(draws.rows, draws.levels * draws.rows)
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: draws.rows, : rows.shape[1]] = rows[draws.order]
        batch = CBatch(tokens=draws.rows, buffers=pointers, scratch=scratch)
        chain = _chain(draws, vocab, ids, stands)
        native.loaded().forerun_block(self.program, batch, _programs(follow), chain)
        return draws.said()

    def _bring(self, starts: Sequence[Start], given: Sequence[int], count: int) -> None:
        """Fill the buffers `given` with `count` rows of what these bring."""
        if starts:
            for buffer, parts in zip(
                given, zip(*(start.states for start in starts), strict=True), strict=True
            ):
                np.concatenate(parts, out=self.buffers.arrays[buffer][:count])


@dataclass(frozen=True, slots=True)
class Start:
    """Where a round begins in one slot: what is read first, whose last token says the one that
    `link` goes on from.

    Attributes:
        segment: tokens that nobody has read yet; it wants the last one's logits.
        states: float32 [tokens, width] each, what they are paired with is made of.
        key: the stream of noise that the first token is said with.
        link: the token in it is not known yet.
    """

    segment: Segment
    states: Sequence[np.ndarray]
    key: int
    link: Link


def _chain(
    draws: Draws, vocab: int, ids: np.ndarray | None, stands: array[float] | None = None
) -> CChain:
    """The C structure; it points into these objects."""
    chain = CChain(
        levels=draws.levels, rows=draws.rows, logits=LOGITS, vocab=vocab, active=address(draws.active),
        temperature=address(draws.temperature), keys=address(draws.keys), tokens=address(draws.tokens),
        ids=None if ids is None else ids.ctypes.data, said=0 if ids is None else len(ids),
    )  # fmt: skip
    if stands is not None:
        draws.weigh()
        chain.stands, chain.floors = address(stands), address(draws.floors)
        chain.confidence_bins, chain.counts = address(draws.sure), address(draws.counts)
        chain.beside, chain.beside_sure = address(draws.beside), address(draws.beside_sure)
    return chain


def _programs(recorded: Sequence[Recorded]) -> ctypes.Array[ctypes._Pointer[CProgram]]:
    """Pointers to their programs, one behind the other."""
    return (ctypes.POINTER(CProgram) * len(recorded))(
        *(ctypes.pointer(each.program) for each in recorded)
    )


class _Buffers:
    """A program's buffers, grown when a pass needs more rows. All but LOGITS have a row for each
    token."""

    def __init__(self, widths: np.ndarray, scratch: int) -> None:
        self.widths, self.scratch_row, self.rows, self.wanted = widths, scratch, 0, 0

    def fit(self, rows: int, wanted: int) -> tuple[int, int]:
        """(pointers to the buffers, pointer to scratch) with room for so many rows, and wanted rows
        of logits."""
        if rows > self.rows or wanted > self.wanted:
            self.rows, self.wanted = max(rows, self.rows, ROOM), max(wanted, self.wanted, ROOM)
            counts = [self.wanted if i == LOGITS else self.rows for i in range(len(self.widths))]
            self._logits: dict[int, Tensor] = {}
            self.arrays = [
                np.zeros((n, w), np.float32) for n, w in zip(counts, self.widths, strict=True)
            ]
            self.pointers = array("Q", [a.ctypes.data for a in self.arrays])
            self.scratch = np.zeros(self.rows * self.scratch_row + 64, dtype=np.uint8)
            self.at = address(self.pointers), -(-self.scratch.ctypes.data // 64) * 64
        return self.at

    def logits(self, wanted: int) -> Tensor:
        """Its first rows of logits, as they are until the next pass: to make a tensor of them takes
        longer behind a pass than much else, so those that were made are kept."""
        if wanted not in self._logits:
            self._logits[wanted] = torch.from_numpy(self.arrays[LOGITS][:wanted])
        return self._logits[wanted]
