"""Fixture that records what draft heads compute while engines run."""

import pytest

from tests.draft.recording import LogitRecorder, record_logits


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitRecorder:
    return record_logits(monkeypatch)
