"""Put a head that was trained here among those that come with forerun: its weights in int8, its
card beside them.

python scripts/bundle_drafter.py DIRECTORY [MODEL]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from forerun import LLM
from forerun.draft.eagle.module import load_head, save_head
from forerun.draft.kinds import BUNDLED
from forerun.draft.proposer import view_of
from forerun.models.hub import DEFAULT


def main(source: Path, model: str | None) -> None:
    """Replace what is there."""
    out = BUNDLED / (model or DEFAULT).rpartition("/")[2]
    head = load_head(source, view_of(LLM(model, draft="off", kv_tokens=256).decoder))
    save_head(head, out, model or DEFAULT, torch.int8)
    for name in ("README.md", "training.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    (out / "model.safetensors").chmod(0o644)
    print(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
