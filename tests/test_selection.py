"""The selection of cases of slow tests for `make test`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import mark_full


def item(nodeid: str, *args: int) -> Any:
    marks: list[pytest.MarkDecorator] = []
    marker = SimpleNamespace(args=args) if args else None
    found = SimpleNamespace(nodeid=nodeid, marks=marks, add_marker=marks.append)
    found.get_closest_marker = lambda name: marker if name == "one_in" else None
    return found


def test_one_in_n_cases_of_each_test_is_selected() -> None:
    names = [f"tests/a.py::test_{name}[{case}]" for name in "ab" for case in range(5)]
    items = [item(name, 3) for name in names]
    mark_full(items)
    selected = [found.nodeid[-6:] for found in items if not found.marks]
    assert selected == ["t_a[0]", "t_a[3]", "t_b[0]", "t_b[3]"]
    assert all(mark.name == "full" for found in items for mark in found.marks)


def test_no_case_is_selected_if_n_is_zero_and_all_without_the_mark() -> None:
    slow, unmarked = item("tests/a.py::test_a", 0), item("tests/a.py::test_b[1]")
    mark_full([slow, unmarked])
    assert [mark.name for mark in slow.marks] == ["full"] and not unmarked.marks
