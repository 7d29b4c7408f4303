"""What all tests share: no network, and no CUDA tests where there is no CUDA device."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import pytest
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background: programs that are tested inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny models: a second thread costs more than it gives


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
