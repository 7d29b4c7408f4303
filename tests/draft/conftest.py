"""What tests of heads see while engines run."""

import pytest

from tests.draft.watching import Watch, watching


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watching(monkeypatch)
