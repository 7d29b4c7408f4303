"""Fixtures for models: native kernels with two threads, and a home directory without models."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    from forerun.kernels import native

    if native.library() is not None:
        native.start(2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tests.models.homes import bare_home

    return bare_home(tmp_path, monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"
