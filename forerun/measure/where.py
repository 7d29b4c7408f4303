"""Where something was measured."""

from __future__ import annotations

from typing import Any


def machine(threads: int = 0) -> dict[str, Any]:
    """Where something was measured, in plain values."""
    import torch

    from forerun import __version__
    from forerun.hardware import cores, processor
    from forerun.kernels import native

    has_kernels = native.library() is not None
    return {
        "processor": processor(), "cores": cores(), "threads": threads or cores(),
        "instructions": native.instructions() if has_kernels else "torch", "torch": torch.__version__,
        "forerun": __version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip
