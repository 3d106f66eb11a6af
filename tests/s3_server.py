"""An S3 server on this machine, whose conditional puts are atomic: it answers one at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server(bucket: str, port: int = 0) -> Iterator[str]:
    """The URL of a bucket, for this process and those that it starts meanwhile.

    What a server held is there again on the next one of this process; at its end, its port refuses
    connections.
    """
    import fsspec
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, application, threaded=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
    with mock.patch.dict(os.environ, SETTINGS | place):
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
