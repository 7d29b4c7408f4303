"""Fixtures for measurements: an empty registry and a fixed read bandwidth."""

from pathlib import Path

import pytest

from forerun.kernels import native


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep results out of the user's registry."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def fixed_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measured read bandwidth by 10 GB/s."""
    monkeypatch.setattr(native, "read_bandwidth", lambda megabytes=256: 10.0)
