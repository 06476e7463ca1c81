"""Small blocking calls to servers of our own, straight to their address: no proxy that the environment names is asked,
which could not reach them and would be shown keys and weights' addresses."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

NO_ANSWER = (OSError, http.client.HTTPException, ValueError)
"""What `request` raises where no HTTP answer came: nobody listens there, or something that does not speak HTTP."""


def request(
    url: str, timeout_s: float, *, method: str = "GET", body: bytes | None = None
) -> tuple[int, bytes]:
    """Status and content of the answer, whatever the status; ``body`` is sent as JSON.

    Raises:
        OSError, http.client.HTTPException, ValueError: see ``NO_ANSWER``.
    """
    asked = urllib.request.Request(url, method=method, data=body, headers={"Content-Type": "application/json"})
    try:
        with _OPENER.open(asked, timeout=timeout_s) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
