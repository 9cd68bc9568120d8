"""An HTTP server that says one thing to every request.

Holds no assertions, and knows no protocol beyond HTTP.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """What the server says to every request from now on."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
    length: int | None = None  # stated bytes, where they are not those of the body
    drip_s: float = 0.0  # seconds between two bytes of the body


class FakeServer:
    """Says one thing to every request, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self) -> None:
                outer.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = outer.answer
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                stated = len(answer.body) if answer.length is None else answer.length
                self.send_header("Content-Length", str(stated))
                self.end_headers()
                with suppress(ConnectionError):  # whoever asked has gone
                    for byte in answer.body if self.command != "HEAD" and answer.drip_s else b"":
                        time.sleep(answer.drip_s)
                        self.wfile.write(bytes([byte]))
                if self.command != "HEAD" and not answer.drip_s:
                    self.wfile.write(answer.body)
                self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = reply

            def log_message(self, format: str, *args: object) -> None:
                """Tests are quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
