"""Lines of JSON: everything that is written by lines is one line to every reader."""

from __future__ import annotations

import json
from typing import Any

# JSON escapes the other characters at which `str.splitlines` and many clients split
LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_line(value: Any, ascii_only: bool = False) -> str:
    """Write a value as JSON on one line, without the line's end.

    `ascii_only` escapes every character beyond ASCII, for terminals and logs whose encoding is unknown. Raises
    TypeError, ValueError, RecursionError for what JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=ascii_only)
    for character, escape in LINE_ENDS.items():
        text = text.replace(character, escape)
    return text
