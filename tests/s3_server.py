"""An S3 server on this machine, whose conditional puts are atomic: it answers one at a time.

Unless it is `threaded`, for figures.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SMALLEST_PART = 1 << 10
SLOW_SECONDS = 0.05
FAR_SECONDS = 0.03
FAR_BYTES_PER_SECOND = 80e6

Fault = Callable[[str, str], str]
"""Told the method and the address of a request, says what befalls it.

``refuse``: the connection ends before it is handled; ``lose``: after that, without an answer;
``cut``: in the middle of the answer; ``busy``: it is told to come back later; ``slow``: it waits;
``far``: it waits as for a server in another building, by the size of what is sent; ``blind``: its
condition is not seen; empty: nothing.
"""


class Faulty:
    """What the server runs, with what befalls its requests."""

    def __init__(self, handle: Callable[..., Iterable[bytes]], fault: Fault) -> None:
        self._handle = handle
        self._fault = fault

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        address = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        fault = self._fault(environ["REQUEST_METHOD"], address)
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        if fault == "far":
            # What is sent, or asked for as "bytes=FIRST-LAST".
            ends = environ.get("HTTP_RANGE", "=0-0").partition("=")[2].split("-")
            size = int(environ.get("CONTENT_LENGTH") or 0) + int(ends[1]) - int(ends[0])
            time.sleep(FAR_SECONDS + size / FAR_BYTES_PER_SECOND)
        if fault == "blind":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if fault == "busy":
            # Who sends a large request waits for an answer to its head.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>come back later</Message></Error>"]
        if fault == "lose":
            for _ in self._handle(environ, lambda *_: None):
                pass
        if fault in ("refuse", "lose"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError(fault)
        answer = self._handle(environ, start)
        return self._half(environ, answer) if fault == "cut" else answer

    def _half(self, environ: dict[str, Any], answer: Iterable[bytes]) -> Iterator[bytes]:
        content = b"".join(answer)
        yield content[: len(content) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@contextmanager
def s3_server(
    bucket: str, port: int = 0, fault: Fault | None = None, *, threaded: bool = False
) -> Iterator[str]:
    """The URL of a bucket, for this process and those that it starts meanwhile.

    What a server held is there again on the next one of this process; at its end, its port refuses
    connections. Parts of an upload may be small.
    """
    import fsspec
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    handle = application if fault is None else Faulty(application, fault)
    server = make_server("127.0.0.1", port, handle, threaded=threaded)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
    with (
        mock.patch.dict(os.environ, SETTINGS | place),
        mock.patch("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", SMALLEST_PART),
    ):
        fsspec.filesystem("s3").clear_instance_cache()
        if not fsspec.filesystem("s3").exists(bucket):
            fsspec.filesystem("s3").mkdir(bucket)
        try:
            yield f"s3://{bucket}"
        finally:
            fsspec.filesystem("s3").clear_instance_cache()
            server.shutdown()
            thread.join()
            server.server_close()
