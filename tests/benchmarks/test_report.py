"""Tables of result lines."""

import json
from pathlib import Path

import pytest

from benchmarks.report import best_settings, main, read_lines, table
from forerun import ConfigError


def line(draft: str, times: float, **more: object) -> dict:
    base = {"kind": "sweep", "draft": draft, "model": "m", "category": "chat", "temperature": 0.0}
    base |= {"depth": 2, "tokens_per_second": 10 * times, "times_plain": times, "requests": 1}
    return base | {"interval": [times - 0.1, times + 0.1], "draft_ms": 1.5} | more


def test_tables_best_settings_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns with one value are left out; `--best` keeps the best setting of each category."""
    lines = [line("off", 1.0, interval=None), line("suffix", 1.2), line("suffix", 1.5, depth=4)]
    lines.append(line("suffix", 0.9, depth="auto", category="edit"))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    pytest.importorskip("matplotlib")
    main([str(tmp_path / "x.jsonl"), "--plot", str(tmp_path / "x.png")])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("| draft | category | depth | tokens/s | times plain (95 %) |")
    assert out[3] == "| `suffix` | chat | 2 | 12.00 | 1.20 (1.10 to 1.30) |  | 1.50 |  |"
    assert (tmp_path / "x.png").stat().st_size > 1000
    best = best_settings(lines)
    assert [(b["category"], b["depth"]) for b in best] == [("chat", 4), ("edit", "auto")]
    main([str(tmp_path / "x.jsonl"), "--best"])
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_table_of_server_results() -> None:
    served = {"kind": "serve", "draft": None, "times_plain": None, "tokens_per_second": 5.0}
    served |= {"server": "vllm", "requests": 4, "requests_per_second": 1.0}
    rows = table([served | {"first_token_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0}}]).splitlines()
    assert rows[2] == "| 5.00 |  | 1.00 | 1.0, 2.0, 3.0 |  |  |"


@pytest.mark.parametrize("text", ["[1]", "{", '{"kind": "sweep"}', ""])
def test_files_without_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError):
        read_lines([tmp_path / "x.jsonl"])
