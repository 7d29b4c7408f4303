"""Numbers for refutations: as many digits as it takes to see the difference, and how often it is
what is allowed."""

from __future__ import annotations

import math

MOST = 17  # decimals: what a float64 below 1 has
BEYOND = 1e6  # a number that says no more when it is spelled out


def pair(one: float, other: float, decimals: int = 3) -> tuple[str, str]:
    """Two numbers with as many decimals as show two digits of their difference, `decimals` at
    least."""
    apart = abs(one - other)
    if 0 < apart < math.inf:
        decimals = min(max(1 - math.floor(math.log10(apart)), decimals), MOST)
    return f"{one:.{decimals}f}", f"{other:.{decimals}f}"


def times(amount: float, allowed: float, what: str) -> str:
    """How far an amount is beyond what is allowed, which may be nothing."""
    if not allowed:
        return f"where {what} allows none"
    ratio = amount / allowed
    many = f"{float(f'{ratio:.2g}'):,.0f}" if ratio < BEYOND else f"over {BEYOND:,.0f}"
    return f"{many} times what {what} allows ({allowed:.2g})"


def odds(evidence: float) -> str:
    """So much to 1."""
    if evidence >= BEYOND:
        return f"over {BEYOND:,.0f} to 1"
    return f"{evidence:,.0f} to 1" if evidence >= 100 else f"{evidence:.2f} to 1"


def off(hits: float, chance: float) -> str:
    """How often something came, of 1, and how often it should have."""
    came, meant = pair(100 * hits, 100 * chance, 1)
    astray = f"{100 * abs(hits - chance):.2g} points too {'often' if hits > chance else 'seldom'}"
    return f"comes in {came}% of cases where the target's own probability is {meant}%, {astray}"
