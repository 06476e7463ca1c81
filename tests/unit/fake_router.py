"""A program with the HTTP face of sglang-router: its health and its list of workers, kept in memory.

usage: fake_router.py PORT FILE: ends at once when FILE exists; while FILE.deaf does, it takes no engine.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORKERS: dict[str, str] = {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        listed = [{"id": number, "url": url} for number, url in WORKERS.items()]
        self._answer({"workers": listed} if self.path == "/workers" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not Path(f"{sys.argv[2]}.deaf").exists():
            WORKERS[str(len(WORKERS))] = body["url"]
        self._answer({})

    def do_DELETE(self) -> None:
        del WORKERS[self.path.rsplit("/", 1)[1]]
        self._answer({})

    def _answer(self, values: dict[str, object]) -> None:
        content = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    if Path(sys.argv[2]).exists():
        sys.exit("cannot listen: planned")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
