"""S3 servers on loopback for tests: moto in this process, seaweedfs in one of its own.

Holds no assertions.
"""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_delta_sync.config import S3StoreConfig

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "for", "AWS_SECRET_ACCESS_KEY": "tests"}
"""What the clients sign with, as environment variables, and what seaweedfs, which reads the same, then asks for."""

_buckets = itertools.count()


def new_bucket(endpoint: str, prefix: str | None = None, timeout_s: float = 30) -> S3StoreConfig:
    """The settings of a bucket that was made for the caller alone."""
    import boto3
    from botocore.config import Config

    name = f"bucket-{next(_buckets)}"
    patience = Config(connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1})
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=patience).create_bucket(Bucket=name)
    return S3StoreConfig(bucket=name, prefix=prefix, endpoint_url=endpoint, region="us-east-1")


@contextmanager
def moto() -> Iterator[str]:
    """The endpoint of a moto server while the context lasts."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def seaweedfs(directory: Path) -> Iterator[str]:
    """The endpoint of a seaweedfs server that keeps its files in `directory`, while the context lasts."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        raise RuntimeError("seaweedfs is not installed: run `make test-stores`, which installs it")
    log = (directory / "weed.log").open("wb")
    command = [program, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    ports = _free_ports(8)
    for role, port, grpc in zip(("master", "volume", "filer", "s3"), ports[:4], ports[4:], strict=True):
        command += [f"-{role}.port={port}", f"-{role}.port.grpc={grpc}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=100"]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory)
    endpoint = f"http://127.0.0.1:{ports[3]}"
    try:
        _await(endpoint, process, directory / "weed.log")
        yield endpoint
    finally:
        process.kill()  # asked kindly, it takes half a minute, and what it holds is of no use to anybody
        process.wait()
        log.close()


def _await(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server takes buckets, which is later than it takes connections."""
    from botocore.exceptions import BotoCoreError, ClientError

    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            new_bucket(endpoint, timeout_s=2)  # a request that comes too early is never answered
            return
        except (BotoCoreError, ClientError):
            time.sleep(0.2)
    raise RuntimeError(f"seaweedfs does not serve:\n{log.read_text(errors='replace')[-4000:]}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
