"""What a model on disk is, from its headers alone: size, format, family, whether it runs here, who
drafts for it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.draft.registry import Look, automatic, bundled_for, recognise
from forerun.draft_spec import draft_name
from forerun.errors import LoadError
from forerun.hardware import free_ram
from forerun.kernels import native
from forerun.models.config import FAMILIES, load_config
from forerun.models.files import indexed_files, read_header, read_object, weight_files
from forerun.models.gguf.config import skim, token_digest, unsupported_reason
from forerun.models.local import LocalModel

# What llama.cpp writes as general.file_type: a label of the mix, which the tensors need not follow.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
DTYPES = {  # of safetensors: their names elsewhere, and bits
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "F8_E4M3": ("fp8", 8), "F8_E5M2": ("fp8", 8), "I8": ("int8", 8), "U8": ("uint8", 8), "I32": ("int32", 32),
    "I64": ("int64", 64),
}  # fmt: skip
ROOM = 1.1  # memory a model takes, in sizes of its file: the cache of keys and values comes on top
DRAFT_SHARE = 0.5  # a drafter with more of its target's parameters than this cannot pay


@dataclass(frozen=True, slots=True)
class Survey:
    """One model, as plain values.

    Attributes:
        name, origin: what to give for --model, and whose it is.
        path: the GGUF file, of several the first, or the directory.
        bytes, format: all its files; Q4_K_M or safetensors bfloat16, with what most of it is where
            that differs.
        family, parameters, context: empty or None where they cannot be told.
        runs: whether forerun runs it on this machine; `reason` says why not.
        draft: what `--draft auto`, the default, drafts with; empty where it does not run.
        drafter: a smaller model with its vocabulary that can be given to --draft instead; empty
            where there is none.
        vocabulary: the same for models whose token ids mean the same.
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
    draft: str = ""
    drafter: str = ""
    vocabulary: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def survey(models: Sequence[LocalModel]) -> list[Survey]:
    """All models, looked at and paired with drafters. A broken one is a row that says so."""
    free = free_ram()
    rows = [_one(model, free) for model in models]
    return [
        replace(row, draft=_auto(row), drafter=_smaller(row, rows)) if row.runs else row
        for row in rows
    ]


def _one(model: LocalModel, free: int) -> Survey:
    row = Survey(model.name, model.origin, str(model.path), reason=model.trouble)
    if model.trouble:
        return row
    try:
        row = _of_directory(model.path, row) if model.path.is_dir() else _of_gguf(model.path, row)
    except LoadError as error:
        return replace(row, reason=str(error).removeprefix(str(model.path)).lstrip(" :/"))
    except Exception as error:  # whatever is wrong with one file, the others are still wanted
        return replace(
            row, reason=f"cannot be read: {(str(error).strip() or repr(error)).splitlines()[0]}"
        )
    if not row.reason and row.bytes * ROOM > free:
        row = replace(
            row,
            reason=f"needs {row.bytes * ROOM / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free",
        )
    return replace(row, runs=not row.reason)


def _of_gguf(path: Path, row: Survey) -> Survey:
    file = skim(path)
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.kind] += tensor.size
    context = file.metadata.get(f"{file.architecture}.context_length")
    label = file.metadata.get("general.file_type")
    return replace(
        row,
        bytes=sum(part.stat().st_size for part in file.parts),
        format=_format(FILE_TYPES.get(label, "") if isinstance(label, int) else "", counts),
        family=file.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        context=context if isinstance(context, int) else None,
        reason=unsupported_reason(file),
        vocabulary=token_digest(file.metadata),
    )


def _format(label: str, counts: Counter[str]) -> str:
    """The label of a file, and the type of most of its bytes where that is another one."""
    if not counts:
        return label
    kind, most = counts.most_common(1)[0]
    if not label or label == kind:
        return kind
    return label if label.startswith(kind) else f"{label}, {most / counts.total():.0%} {kind}"


def _of_directory(path: Path, row: Survey) -> Survey:
    raw = read_object(path / "config.json")
    files = _weights(path)
    counts: Counter[str] = Counter()
    tensors = {name: tensor for file in files for name, tensor in read_header(file).items()}
    for tensor in tensors.values():
        counts[tensor["dtype"]] += math.prod(tensor["shape"])
    quantised = raw.get("quantization_config") or raw.get("quantization")
    kind = max(counts, key=lambda dtype: counts[dtype] * DTYPES.get(dtype, ("", 8))[1], default="")
    return replace(
        row,
        bytes=sum(file.stat().st_size for file in files),
        format=f"safetensors {_method(quantised) if quantised else DTYPES.get(kind, (kind,))[0]}",
        family=str(raw.get("model_type", "")),
        parameters=None if quantised else counts.total(),
        context=raw.get("max_position_embeddings") or raw.get("n_positions"),
        reason=_why_no_directory(path, raw, tensors),
        vocabulary=tokenizer_digest(path / "tokenizer.json"),
    )


def _method(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "quantised"
    bits = settings.get("bits")
    return f"{settings.get('quant_method', 'mlx')}{f' {bits} bits' if bits else ''}"


def _why_no_directory(path: Path, raw: dict[str, Any], tensors: Collection[str]) -> str:
    kind = recognise(Look(raw, tensors, tokenizer=True))
    if kind.draft != "model" and kind.dialect != "native":
        return f"is no model but a drafter for one, {'which --draft takes' if kind.draft else f'and {kind.why}'}"
    if raw.get("model_type") not in FAMILIES:
        return f"family {raw.get('model_type') or 'without a name'} is not supported"
    settings = raw.get("quantization_config") or raw.get("quantization")
    if isinstance(settings, dict) and "quant_method" not in settings:
        return "weights in MLX's format are not supported"
    try:
        load_config(path)
    except LoadError as error:
        return str(error)
    return ""


def _weights(path: Path) -> list[Path]:
    """The safetensors files of a directory. Raises LoadError where its index names one that is not
    there."""
    index = path / "model.safetensors.index.json"
    names = set(weight_files(path))
    if index.is_file():
        names = set(indexed_files(index))
    missing = sorted(file.name for file in names if not file.is_file())
    if missing:
        raise LoadError(f"{path} is not whole, {missing[0]} is not there: download it again")
    return sorted(names)


def tokenizer_digest(path: Path) -> str:
    """The digest of a tokenizer file; files of the Hub's cache are called by theirs."""
    if not path.is_file():
        return ""
    name = path.resolve().name
    return f"json {name if len(name) == 64 else hashlib.sha256(path.read_bytes()).hexdigest()}"


def _instructions() -> str:
    """The instruction set that a model would run with here, "" where torch would compute it."""
    on_gpu = Path("/proc/driver/nvidia/version").exists() and "+cpu" not in version("torch")
    return "" if native.reason() or on_gpu else native.instructions() or native.start()


def _auto(row: Survey) -> str:
    """What auto is for a model, as the server names it."""
    instructions = _instructions() if bundled_for(Path(row.path)) else ""
    bits = 8 * row.bytes / row.parameters if row.parameters else 0.0
    return draft_name(automatic("auto", Path(row.path), instructions, bits))


def _smaller(target: Survey, rows: Sequence[Survey]) -> str:
    """The smallest model with the target's vocabulary that is much smaller than the target; empty
    without one."""
    size = target.parameters or target.bytes
    fitting = [
        (row.parameters, row.bytes, row.name) for row in rows
        if row.runs and row.vocabulary and row.vocabulary == target.vocabulary
        and row.parameters and row.parameters <= size * DRAFT_SHARE
    ]  # fmt: skip
    return f"model:{min(fitting)[2]}" if fitting else ""
