"""Survey of local models from their headers: size, format, family, support and drafters."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.draft.gguf_heads import head_kind
from forerun.draft.kinds import Look, automatic, has_drafter, recognise
from forerun.draft_spec import draft_name
from forerun.errors import LoadError, first_line
from forerun.hardware import free_ram
from forerun.kernels import native
from forerun.models.config import TRANSFORMERS, has_decoder, is_known_family, load_config, text_part
from forerun.models.files import indexed_files, read_header, read_object, weight_files
from forerun.models.gguf.config import skim, token_digest, unsupported_reason
from forerun.models.local import LocalModel

# llama.cpp's general.file_type: a label of the mix of types, which the tensors need not follow
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
# dtypes of safetensors: common name and bits
DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16),
    "BF16": ("bfloat16", 16), "F8_E4M3": ("fp8", 8), "F8_E5M2": ("fp8", 8), "I8": ("int8", 8),
    "U8": ("uint8", 8),
    "I32": ("int32", 32), "I64": ("int64", 64),
}  # fmt: skip
MEMORY_FACTOR = 1.1  # memory of a model relative to its file, without the KV cache
DRAFTER = "is no model but a drafter for one, which --draft takes"
MAX_DRAFT_SHARE = 0.5  # a drafter with a larger share of its target's parameters cannot pay


@dataclass(frozen=True, slots=True)
class Survey:
    """One local model, as plain values.

    Attributes:
        name, origin: its name for `--model`, and the program or place that it comes from.
        path: the directory, or the first GGUF file.
        bytes: size of all its files.
        format: such as Q4_K_M or safetensors bfloat16; with the type of most bytes if it differs.
        family, parameters, context: empty or None where unknown.
        runs: whether forerun runs it on this machine.
        reason: why it does not run.
        backend: what runs it, "forerun", or "transformers" for a family that only transformers has;
            empty where it does not run.
        draft: what `--draft auto` uses; empty where it does not run.
        drafter: a smaller model with its vocabulary for `--draft`; empty without one.
        vocabulary: equal for models whose token ids mean the same.
    """

    name: str
    origin: str
    path: str
    bytes: int = 0
    format: str = ""
    family: str = ""
    parameters: int | None = None
    context: int | None = None
    runs: bool = False
    reason: str = ""
    backend: str = ""
    draft: str = ""
    drafter: str = ""
    vocabulary: str = ""

    def can_draft_for(self, target: Survey) -> bool:
        """Return True if it runs, has the target's vocabulary and is much smaller."""
        if not self.runs or not self.vocabulary or self.vocabulary != target.vocabulary:
            return False
        limit = (target.parameters or target.bytes) * MAX_DRAFT_SHARE
        return bool(self.parameters) and (self.parameters or 0) <= limit


def survey(models: Sequence[LocalModel]) -> list[Survey]:
    """Survey models and pair them with drafters; a broken model's row describes the error."""
    free = free_ram()
    rows = [_survey_one(model, free) for model in models]
    return [
        replace(
            row,
            backend=row.backend or "forerun",
            draft=_automatic_draft(row),
            drafter=_smaller_model(row, rows),
        )
        if row.runs
        else replace(row, backend="")
        for row in rows
    ]


def _survey_one(model: LocalModel, free: int) -> Survey:
    row = Survey(model.name, model.origin, str(model.path), reason=model.trouble)
    if model.trouble:
        return row
    try:
        read = _survey_directory if model.path.is_dir() else _survey_gguf
        row = read(model.path, row)
    except LoadError as error:
        return replace(row, reason=str(error).removeprefix(str(model.path)).lstrip(" :/"))
    except Exception as error:  # one broken file must not hide the other models
        why = first_line(error)
        return replace(row, reason=f"cannot be read: {why}")
    needed = row.bytes * MEMORY_FACTOR
    if not row.reason and needed > free:
        reason = f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        row = replace(row, reason=reason)
    return replace(row, runs=not row.reason)


def _survey_gguf(path: Path, row: Survey) -> Survey:
    file = skim(path)
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind] += tensor.size
    context = file.metadata.get(f"{file.architecture}.context_length")
    label = file.metadata.get("general.file_type")
    return replace(
        row,
        bytes=sum(part.stat().st_size for part in file.parts),
        format=_gguf_format(FILE_TYPES.get(label, "") if isinstance(label, int) else "", sizes),
        family=file.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        context=context if isinstance(context, int) else None,
        reason=DRAFTER if head_kind(file) else unsupported_reason(file),
        vocabulary=token_digest(file.metadata),
    )


def _gguf_format(label: str, sizes: Counter[str]) -> str:
    """Return a file's label, with the type of most of its bytes if that is another one."""
    if not sizes:
        return label
    kind, most = sizes.most_common(1)[0]
    if not label or label == kind:
        return kind
    return label if label.startswith(kind) else f"{label}, {most / sizes.total():.0%} {kind}"


def _survey_directory(path: Path, row: Survey) -> Survey:
    raw = read_object(path / "config.json")
    raw = text_part(raw) if has_decoder(raw) else raw
    files = _safetensors(path)
    tensors = {name: tensor for file in files for name, tensor in read_header(file).items()}
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor["dtype"]] += math.prod(tensor["shape"])
    quantization = raw.get("quantization_config") or raw.get("quantization")
    kind = max(counts, key=lambda d: counts[d] * DTYPES.get(d, ("", 8))[1], default="")
    method = _method(quantization) if quantization else DTYPES.get(kind, (kind,))[0]
    return replace(
        row,
        bytes=sum(file.stat().st_size for file in files),
        format=f"safetensors {method}",
        family=str(raw.get("model_type", "")),
        backend="" if has_decoder(raw) else TRANSFORMERS,
        parameters=None if quantization else counts.total(),
        context=raw.get("max_position_embeddings") or raw.get("n_positions"),
        reason=_directory_refusal(path, raw, tensors),
        vocabulary=tokenizer_digest(path / "tokenizer.json"),
    )


def _method(quantization: Any) -> str:
    if not isinstance(quantization, dict):
        return "quantised"
    bits = quantization.get("bits")
    return f"{quantization.get('quant_method', 'mlx')}{f' {bits} bits' if bits else ''}"


def _directory_refusal(path: Path, raw: dict[str, Any], tensors: Collection[str]) -> str:
    kind = recognise(Look(raw, tensors, tokenizer=True))
    if kind.draft != "model" and kind.format != "native":
        return DRAFTER if kind.draft else f"is no model but a drafter for one, and {kind.why}"
    if not is_known_family(raw):
        return f"family {raw.get('model_type') or 'without a name'} is not supported"
    quantization = raw.get("quantization_config") or raw.get("quantization")
    if isinstance(quantization, dict) and "quant_method" not in quantization:
        return "weights in MLX's format are not supported"
    try:
        load_config(path)
    except LoadError as error:
        return str(error)
    return ""


def _safetensors(path: Path) -> list[Path]:
    """Return a directory's safetensors files. Raises LoadError if one of its index is missing."""
    index = path / "model.safetensors.index.json"
    files = set(indexed_files(index) if index.is_file() else weight_files(path))
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise LoadError(f"{path} is not whole, {missing[0]} is missing: download it again")
    return sorted(files)


def tokenizer_digest(path: Path) -> str:
    """Return the digest of a tokenizer file; in the Hub's cache its file name is its digest."""
    if not path.is_file():
        return ""
    name = path.resolve().name
    return f"json {name if len(name) == 64 else hashlib.sha256(path.read_bytes()).hexdigest()}"


def _automatic_draft(row: Survey) -> str:
    """Return the drafter that `--draft auto` uses for a model, as the server names it."""
    path = Path(row.path)
    instructions = _native_instructions() if has_drafter(path) else ""
    return draft_name(automatic("auto", path, instructions))


def _native_instructions() -> str:
    """Return the instruction set of the native kernels; "" where torch would be used."""
    on_gpu = Path("/proc/driver/nvidia/version").exists() and "+cpu" not in version("torch")
    return "" if native.reason() or on_gpu else native.instructions() or native.start()


def _smaller_model(target: Survey, rows: Sequence[Survey]) -> str:
    """Return the smallest model that can draft for the target, for `--draft`; "" without one."""
    fitting = [row for row in rows if row.can_draft_for(target)]
    if not fitting:
        return ""
    return f"model:{min(fitting, key=lambda r: (r.parameters, r.bytes, r.name)).name}"
