"""Addresses of servers: who can reach them, and how they are written."""

from __future__ import annotations

import ipaddress

_LOOPBACK_OF_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``. A name other than ``localhost`` may be anybody's.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("127.example.com")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """Where this machine reaches a server of its own that listens on ``host``, which may stand for all addresses.

    >>> url_of("0.0.0.0", 80), url_of("::", 80), url_of("fd00::5", 80)
    ('http://127.0.0.1:80', 'http://[::1]:80', 'http://[fd00::5]:80')
    """
    host = _LOOPBACK_OF_ALL.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
