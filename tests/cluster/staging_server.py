"""A web server that knows ranges, on this machine, for tests of remote sources."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves `content` by path; counts the bytes that it has given."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content
        self.given_bytes = 0
        self.pause_seconds = 0.0
        self.failures = 0
        self.ranges = True
        super().__init__(("127.0.0.1", 0), _Handler)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        content = self.server.content.get(self.path)
        if content is None or (body and self.server.failures > 0):
            self.server.failures -= content is not None
            self.send_response(404 if content is None else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        wanted = self.headers.get("Range") if self.server.ranges else None
        part = content
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(content)}"')
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if wanted:
            end = int(first) + len(part) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(content)}")
        self.end_headers()
        if body:
            time.sleep(self.server.pause_seconds)
            with contextlib.suppress(OSError):
                self.wfile.write(part)
                self.server.given_bytes += len(part)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def serving(content: dict[str, bytes]) -> Iterator[Server]:
    server = Server(content)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
