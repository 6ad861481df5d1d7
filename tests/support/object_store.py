"""An object store that answers as S3 does. A process of its own: what asks it may hold this one's interpreter lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from boto3 import client
from botocore.config import Config

from durable.embedded.ports import free_port

BUCKET = "archive"
_UNTIL_IT_LISTENS = Config(retries={"total_max_attempts": 20, "mode": "standard"})


@contextmanager
def object_store() -> Iterator[Mapping[str, str]]:
    """With an empty bucket; yields the environment in which it is reached."""
    port = free_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
    }
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            client(
                "s3",
                endpoint_url=environment["AWS_ENDPOINT_URL"],
                region_name=environment["AWS_REGION"],
                aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
                config=_UNTIL_IT_LISTENS,
            ).create_bucket(Bucket=BUCKET)
            yield environment
        finally:
            server.kill()
