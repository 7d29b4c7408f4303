"""One tiny pair for all tests of the measuring tools, and a clock that does not depend on the machine."""

from pathlib import Path

import pytest

from forerun.bench.pair import Pair, make_pair
from forerun.bench.recipe import PairRecipe
from forerun.kernels import native

SHAPE = dict(
    layers=3, draft_layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, context=256,
)  # fmt: skip


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    recipe = PairRecipe(**SHAPE, agree=0.7, tolerance=0.03, prompts=6, prompt_tokens=24)
    return make_pair(tmp_path_factory.mktemp("bench") / "pair", recipe)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is nobody's."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read bandwidth of 10 GB/s, at once."""
    monkeypatch.setattr(native, "read_bandwidth", lambda megabytes=256: 10.0)
