"""Drafters for a GGUF target: every recipe trains from the file, and what it writes drafts for it
without a trace."""

import json
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.kernels import native
from tests import gguf_files
from tests.cli.test_main import run
from tests.train.conftest import SMALL

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
RECIPES = {
    "small-lm": ("model", "--layers", "1"), "medusa": ("medusa", "--heads", "2"), "eagle3": ("eagle3", "--unroll", "2"),
    "mtp": ("mtp", "--unroll", "2"), "block": ("block", "--block-size", "3", "--block-layers", "1"),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_from_a_file_to_a_drafter_for_it(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantised matrices, an embedding in another type that is the head as well or is not, and a
    tokenizer in the file; the drafter's own tokenizer makes it fit."""
    path = gguf_files.written("llama", "q4_1", tokenizer="gpt2").path
    data, out, (draft, *options) = tmp_path / "data.jsonl", tmp_path / "drafter", RECIPES[recipe]
    texts = [f"the king and the ring in the inn, number {i * 37}" * 2 for i in range(12)]
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    settings = [
        f"--{k.replace('_', '-')}={v}"
        for k, v in (SMALL | {"steps": 2, "evaluate_every": 2}).items()
    ]
    given = [
        "--target",
        str(path),
        "--recipe",
        recipe,
        "--data",
        str(data),
        "--out",
        str(out),
        *options,
        *settings,
    ]
    code, _, err = run(monkeypatch, capsys, "train", *given)
    assert code == 0, err
    said = {}
    for spec in ("off", f"{draft}:{out}"):
        llm = LLM(path, draft=spec, kv_tokens=1024, depth=2)
        params = [
            SamplingParams.pure(max_tokens=24, temperature=t, seed=3, ignore_eos=True)
            for t in (0.0, 0.8)
        ]
        said[spec] = [llm.generate("the inn", p)[0] for p in params]
    plain, drafted = said.values()
    assert [a.token_ids for a in plain] == [a.token_ids for a in drafted]
    assert sum(a.stats.by_source[draft].drafted for a in drafted) > 5
