"""Ray's own ports ask for a key: they are open to all who reach the machine, and who may use them may run programs."""

from __future__ import annotations

import os
import secrets


def ask_for_key() -> None:
    """Make a Ray that is started by this process ask for one, a new one unless there is one. Ray reads which when it is
    imported: this comes before."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
