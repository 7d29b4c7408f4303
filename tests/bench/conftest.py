"""A registry of their own for all tests of the measuring tools, and a clock that does not depend on
the machine."""

from pathlib import Path

import pytest

from forerun.kernels import native


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is nobody's."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read bandwidth of 10 GB/s, at once."""
    monkeypatch.setattr(native, "read_bandwidth", lambda megabytes=256: 10.0)
