"""Any causal language model of transformers as a decoder: its own module, on a paged KV cache.

Tokens of all requests are one flat sequence [1, T] (`transformers_pass`). Whether a family
really runs in this way is checked when a model is loaded (`_check`): the logits of two requests in
one pass, one of them a draft tree, are compared with transformers' own forward passes over each
path.

This module imports transformers, which takes seconds: import it only for such a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from forerun.cache.attention import Attention, Segment
from forerun.errors import CapacityError, ConfigError, LoadError, one_line
from forerun.hardware import free_ram
from forerun.kernels.experts import ComputeExperts, by_expert
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import ModelConfig, note
from forerun.models.decoder import Attend, Decoder, Recur
from forerun.models.files import read_object
from forerun.models.quantized import is_quantized
from forerun.models.transformers_config import own_model, quiet
from forerun.runtime.transformers_pass import (
    CURRENT,
    NAME,
    ModulePass,
    PassCache,
    ShapeRecorder,
    Shapes,
    TransformersCache,
    UnsupportedModuleError,
    row_width,
)
from forerun.types import Forward

STOCK = "eager"  # transformers' own attention function, which results are compared with
# Largest difference of logits between the paths of a tree and transformers' own forward passes,
# relative to the largest logit: of 32-bit floats, and of 16-bit floats, whose rounding can change
# the choice of experts (up to 0.1 in random models). A wrong mask or position makes a difference of
# the size of the logits.
TOLERANCE = 1e-3
TOLERANCE_16_BIT = 0.25
ROUNDING = 1e-6  # the same of two passes with the same operations
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_f")


class TransformersDecoder(Decoder):
    """A decoder that runs transformers' own module.

    Attributes:
        module: the language model, which may be part of a multimodal one.
        shapes: by layer index, the shapes of the keys and values that it stores.
        cache_dtype: dtype of the KV cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
    ) -> None:
        """Load the module in `path` and check that it computes draft trees as it computes texts.

        Raises:
            LoadError: it cannot be loaded, or cannot run with draft trees; the message says why.
            CapacityError: there is not enough memory.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.context = context
        self.shortlist = None
        self.layer_ids = range(config.layers)
        self.module = _load_module(path, dtype)
        parameters = inspect.signature(self.module.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.selects_logits = "logits_to_keep" in parameters
        try:
            self.module.to(device)
            if "position_ids" not in parameters:
                raise UnsupportedModuleError("it takes no position_ids")
            self.shapes, self.cache_dtype, expected = _own_forward(self)
            self.module.set_attn_implementation(NAME)
            _check(self, expected)
        except UnsupportedModuleError as error:
            raise LoadError(f"{path}: {self._cannot_run} {error}") from None
        except torch.OutOfMemoryError:
            raise CapacityError(f"{path} does not fit into the memory of {device}") from None
        except Exception as error:  # modules fail in ways of their own
            why = one_line(f"{type(error).__name__}: {error}")
            raise LoadError(f"{path}: {self._cannot_run} its module fails ({why})") from None

    @property
    def _cannot_run(self) -> str:
        return f"the family {self.config.family} cannot run on transformers with draft trees:"

    def make_cache(self, *, tokens: int, page: int, slots: int) -> TransformersCache:
        """Allocate a cache of `tokens` tokens in pages of `page` for `slots` requests."""
        return TransformersCache(
            self.shapes,
            tokens=tokens,
            page=page,
            slots=slots,
            context=self.context,
            dtype=self.cache_dtype,
            device=self.device,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of what one token stores in the cache."""
        return row_width(self.shapes) * self.cache_dtype.itemsize

    def with_layers(self, layer_ids: Sequence[int], window: int | None) -> Decoder:
        """Raise ConfigError: a module runs as a whole."""
        raise ConfigError(
            f"{self.config.family} runs on transformers' own module, which has all its layers and"
            " keys: draft with suffix, recycle, retrieval, a draft model or heads instead of"
            " self:layers or self:window"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, without an embedding that is not the output head too.

        A pass of a mixture of experts reads only a part of them."""
        embedding = self.module.get_input_embeddings().weight
        head = self.module.get_output_embeddings()
        skipped = set() if head is None or head.weight is embedding else {id(embedding)}
        return sum(p.nbytes for p in self.module.parameters() if id(p) not in skipped)

    @property
    def precision(self) -> str:
        """Number format of the weights and what multiplies them, for display."""
        return f"{str(self.dtype).removeprefix('torch.')}, transformers on {self.device}"

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        want: Tensor,
        aux_hidden_layers: Sequence[int] = (),
        recur: Recur | None = None,
        experts: ComputeExperts = by_expert,
        past: int = 0,
    ) -> Forward:
        """Run one forward pass over flat tokens, as `Decoder.forward` does.

        `attend` is an `Attention` over a `TransformersCache`; `recur` and `experts` are not used,
        and `past` is as in `PassCache`."""
        assert isinstance(attend, Attention)
        current = ModulePass(attend)
        cache = PassCache(self.config.layers, current, past)
        token = CURRENT.set(current)
        try:
            with self._captured(aux_hidden_layers) as features:
                logits = self.run_module(ids, positions, cache, want)
        finally:
            CURRENT.reset(token)
        if current.updated != set(self.shapes) or current.attended < len(self.shapes):
            raise UnsupportedModuleError("a layer does not use transformers' attention interface")
        return Forward(logits, features)

    def run_module(self, ids: Tensor, positions: Tensor, cache: Cache, want: Tensor) -> Tensor:
        """Run the module over flat tokens [T]; returns the logits of `want`, [M, V], in float32 at
        least."""
        options: dict[str, Any] = {self.cache_argument: cache}
        if self.selects_logits:
            options["logits_to_keep"] = want
        out = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=True,
            return_dict=True,
            **options,
        )
        logits: Tensor = out.logits[0] if self.selects_logits else out.logits[0][want]
        if logits.shape != (len(want), self.config.vocab):
            raise UnsupportedModuleError(f"its logits have the shape {list(logits.shape)}")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @contextmanager
    def _captured(self, aux_hidden_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the hidden states [T, H] at the inputs of these layers during a forward pass;
        `config.layers` is the output of the last one."""
        features: dict[int, Tensor] = {}

        def take_input(index: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                features[index] = self._states(args[0] if args else kwargs["hidden_states"])

            return hook

        def take_output(_: nn.Module, __: Any, out: Any) -> None:
            features[self.config.layers] = self._states(out if isinstance(out, Tensor) else out[0])

        handles = []
        layers = self._layers() if aux_hidden_layers else nn.ModuleList()
        for index in aux_hidden_layers:
            if index < self.config.layers:
                hook = take_input(index)
                handles.append(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(layers[-1].register_forward_hook(take_output))
        try:
            yield features
        finally:
            for handle in handles:
                handle.remove()

    def _layers(self) -> nn.ModuleList:
        """Return the module's layers. Raises ConfigError if they are not one list."""
        for child in self.module.get_decoder().modules():
            if isinstance(child, nn.ModuleList) and len(child) == self.config.layers:
                return child
        raise ConfigError(self._no_states)

    def _states(self, states: Tensor) -> Tensor:
        if states.ndim != 3 or states.shape[2] != self.config.hidden:
            raise ConfigError(self._no_states)
        return states[0]

    @property
    def _no_states(self) -> str:
        return (
            f"the layers of {self.config.family} do not pass on one vector a token: use a draft"
            " that reads no hidden states, such as suffix"
        )

    # ------------------------------------------------------------ what drafters borrow

    def embed(self, ids: Tensor) -> Tensor:
        """Return the rows of the embedding as the first layer gets them, [.., H]."""
        text = self.module.config.get_text_config(decoder=True)
        factor = getattr(text, "embedding_multiplier", None) or 1.0
        rows: Tensor = self.module.get_input_embeddings()(ids.to(self.device)) * factor
        return rows

    def normalise(self, x: Tensor) -> Tensor:
        """Apply the norm before the output head. [T, H] -> [T, H] in float32 at least"""
        decoder = self.module.get_decoder()
        norm = next((n for name in FINAL_NORMS if (n := getattr(decoder, name, None))), None)
        out = x if norm is None else norm(x.to(self.dtype))
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def head(self, x: Tensor) -> Tensor:
        """Apply the output head. [T, H] -> [T, V] in float32 at least"""
        head = self.module.get_output_embeddings()
        logits: Tensor = head(x.to(head.weight.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        text = self.module.config.get_text_config(decoder=True)
        scale = getattr(text, "logit_scale", None) or 1.0
        logits = logits * (scale / (getattr(text, "logits_scaling", None) or 1.0))
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits


# ---------------------------------------------------------------- loading


def _load_module(path: Path, dtype: torch.dtype) -> Any:
    """Load transformers' module from safetensors files. Raises LoadError, CapacityError."""
    raw = read_object(path / "config.json")
    complete, kind = own_model(raw, path / "config.json")
    Checkpoint(path)  # refuses files that are missing, broken or only pointers
    if not is_quantized(raw):
        _check_memory(path, complete, kind, dtype)
    try:
        with quiet():
            loaded: Any = kind.from_pretrained(
                path,
                config=complete,
                dtype=dtype,
                attn_implementation=STOCK,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers and its quantizers raise errors of many kinds
        why = one_line(str(error) or type(error).__name__)
        raise LoadError(f"the model in {path} cannot be loaded by transformers: {why}") from None
    module, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        count = f"{len(missing)} tensors are" if len(missing) > 1 else "a tensor is"
        raise LoadError(f"the checkpoint in {path} is incomplete: {count} missing, {missing[0]}")
    unused = sorted(report["unexpected_keys"])
    if unused:
        note(f"{path}: transformers does not use {len(unused)} tensors, such as {unused[0]}")
    return module.eval().requires_grad_(False)


def _check_memory(path: Path, complete: Any, kind: Any, dtype: torch.dtype) -> None:
    """Raise CapacityError for a module whose parameters do not fit into memory, whatever the files
    hold."""
    try:
        with torch.device("meta"):
            module = kind._from_config(complete)
    except Exception as error:  # sizes that fit no layer
        why = one_line(str(error) or type(error).__name__)
        raise LoadError(f"{path}: transformers cannot build this model: {why}") from None
    needed = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize
    if needed > free_ram():
        raise CapacityError(
            f"the model in {path} needs {needed / 1e9:.1f} GB as {dtype}, and"
            f" {free_ram() / 1e9:.1f} GB are free: use a smaller model, or another dtype"
        )


# ---------------------------------------------------------------- check at load


# a prompt, a tree of a root with two children behind it, and another request
PROMPT, TREE, OTHER = (7, 18, 29, 40), (51, 62, 73), (84, 95, 10)


@torch.inference_mode()
def _own_forward(decoder: TransformersDecoder) -> tuple[Shapes, torch.dtype, Tensor]:
    """Run the module with transformers' own attention over each path of the check.

    Returns:
        the shapes of what each layer stores, the dtype to store it in, and the logits [M, V] of the
        tree's nodes and of the other request behind its first token.
    """
    root, left, right = TREE
    recorder = ShapeRecorder(decoder.config.layers)
    logits = []
    for path in ((*PROMPT, root, left), (*PROMPT, root, right), OTHER):
        recorder.shapes.clear()
        positions = torch.arange(len(path), device=decoder.device)
        ids = torch.tensor(path, device=decoder.device) % decoder.config.vocab
        logits.append(decoder.run_module(ids, positions, recorder, positions))
    if not recorder.shapes:
        raise UnsupportedModuleError("its layers store nothing in a cache")
    dtype = decoder.dtype
    for stored in recorder.dtypes:
        dtype = torch.promote_types(dtype, stored)
    return recorder.shapes, dtype, torch.cat((logits[0][-2:], logits[1][-1:], logits[2][1:]))


@torch.inference_mode()
def _check(decoder: TransformersDecoder, expected: Tensor) -> None:
    """Check that the module computes draft trees and batches as it computes texts.

    A tree and another request, in one pass, must give the logits of `_own_forward`, also if the
    cache claims to be longer. Raises UnsupportedModuleError."""
    vocab = decoder.config.vocab
    prompt, tree, other = ([token % vocab for token in part] for part in (PROMPT, TREE, OTHER))
    cache = decoder.make_cache(tokens=32, page=16, slots=2)
    for slot in range(2):
        cache.pages.grow(slot, 16)
    chain = list(range(-1, len(prompt) - 1))
    _forward(decoder, cache, [Segment(0, prompt, chain, []), Segment(1, other[:1], [-1], [])])
    cache.commit(0, range(len(prompt)))
    cache.commit(1, [0])
    segments = [Segment(0, tree, [-1, 0, 0], [0, 1, 2]), Segment(1, other[1:], [-1, 0], [0, 1])]
    logits = _forward(decoder, cache, segments)
    tolerance = TOLERANCE if decoder.dtype.itemsize >= 4 else TOLERANCE_16_BIT
    scale = expected.abs().max().item()
    names = ("the root", "the left node", "the right node", "another request", "another request")
    for name, difference in zip(names, (logits - expected).abs().amax(-1).tolist(), strict=True):
        if not difference <= tolerance * scale:
            raise UnsupportedModuleError(
                f"the logits of {name} differ by {difference:.2g} of {scale:.2g} from those of"
                f" transformers' own forward pass in {decoder.dtype}"
            )
    past = max(decoder.context - len(tree) - len(other), 1)
    changed, again = (_forward(decoder, cache, segments, length) for length in (past, 0))
    noise = (again - logits).abs().max().item()  # 0 where the operations are deterministic
    if (changed - logits).abs().max().item() > 4 * noise + ROUNDING * scale:
        raise UnsupportedModuleError(
            "its logits depend on the length of the cache, which differs between requests"
        )


def _forward(
    decoder: TransformersDecoder,
    cache: TransformersCache,
    segments: Sequence[Segment],
    past: int = 0,
) -> Tensor:
    """Return the logits of the segments' `want`, [M, V]; `past` as in `PassCache`."""
    attention = Attention(segments, cache, decoder.config)
    ids = torch.tensor([t for s in segments for t in s.tokens], device=decoder.device)
    starts = np.cumsum([0, *(len(segment.tokens) for segment in segments[:-1])])
    want = [int(start) + i for start, s in zip(starts, segments, strict=True) for i in s.want]
    wanted = torch.tensor(want, dtype=torch.int64, device=decoder.device)
    return decoder.forward(ids, attention.positions, attention, wanted, past=past).logits
