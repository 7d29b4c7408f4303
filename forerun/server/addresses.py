"""Which hosts are addresses, and which of them only this machine reaches."""

from __future__ import annotations

from ipaddress import ip_address


def is_address(host: str) -> bool:
    """Whether a host is an address and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on a host."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)
