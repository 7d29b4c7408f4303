"""What is written whole or not at all: a directory has its name when all of it is there, or leaves nothing."""

from pathlib import Path

import pytest

from forerun.whole import whole_directory


def test_a_directory_gets_its_name_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "a", Path("b")):
        with whole_directory(out) as work:
            assert work.parent == tmp_path and work.is_dir() and not out.exists()
            (work / "file").write_text("text")
        assert (out / "file").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_nothing_stays_of_one_that_fails(tmp_path: Path) -> None:
    """Neither after an error nor after Ctrl-C; what was there under the name stays."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for error, out in ((OSError, tmp_path / "a"), (KeyboardInterrupt, tmp_path / "a")):
        with pytest.raises(error), whole_directory(out) as work:
            (work / "file").touch()
            raise error
    with pytest.raises(OSError), whole_directory(there) as work:
        (work / "file").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["there", "there/mine"]
