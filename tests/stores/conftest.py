"""The stores that the contract suite runs against, each as an empty store of the test's own.

Holds no assertions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import servers

from tests.hub.process import HubProcess
from vllm_delta_sync.config import HfStoreConfig, S3StoreConfig
from vllm_delta_sync.store import Store, child, open_store

_names = itertools.count()


class Servers:
    """The servers of a session, each started when it is first asked for."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self._endpoints: dict[str, str] = {}
        self._shared: dict[str, S3StoreConfig] = {}
        self._hub: HubProcess | None = None

    def hub(self) -> HubProcess:
        """The stand-in Hub, with pages so short that a listing has several."""
        if self._hub is None:
            self._hub = self._stack.enter_context(HubProcess(page=3))
        return self._hub

    def endpoint(self, name: str) -> str:
        """Where `moto` or `seaweedfs` listens."""
        if name not in self._endpoints:
            running = servers.moto() if name == "moto" else servers.seaweedfs(self._directory)
            self._endpoints[name] = self._stack.enter_context(running)
        return self._endpoints[name]

    def in_one_bucket(self, name: str) -> S3StoreConfig:
        """The settings of an unused prefix, for a server to which each bucket is a great expense."""
        if name not in self._shared:
            self._shared[name] = servers.new_bucket(self.endpoint(name))
        return self._shared[name].model_copy(update={"prefix": f"run-{next(_names)}"})


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in servers.CREDENTIALS.items():
            environment.setenv(name, value)
        yield Servers(stack, tmp_path_factory.mktemp("seaweedfs"))


Maker = Callable[[Path, Servers], AbstractContextManager[Store]]


def _plain(make: Callable[[Path, Servers], Store]) -> Maker:
    @contextmanager
    def maker(path: Path, running: Servers) -> Iterator[Store]:
        yield make(path, running)

    return maker


def _hub(prefix: str | None = None) -> Maker:
    @contextmanager
    def maker(path: Path, running: Servers) -> Iterator[Store]:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in running.hub().environment.items():
                environment.setenv(name, value)
            yield open_store(HfStoreConfig(bucket=f"tests/bucket-{next(_names)}", prefix=prefix))

    return maker


STORES: dict[str, Maker] = {
    "file": _plain(lambda path, running: open_store(str(path / "bucket"))),
    "file-uri": _plain(lambda path, running: open_store((path / "a bucket").as_uri())),
    "file-child": _plain(lambda path, running: child(open_store(str(path / "bucket")), "run/inner")),
    "file-child-of-child": _plain(lambda path, running: child(child(open_store(str(path / "bucket")), "run"), "inner")),
    "memory": _plain(lambda path, running: open_store(f"memory://contract-{next(_names)}")),
    "memory-prefix": _plain(lambda path, running: open_store(f"memory://contract-{next(_names)}/a/run")),
    "moto": _plain(lambda path, running: open_store(servers.new_bucket(running.endpoint("moto")))),
    "moto-prefix": _plain(lambda path, running: open_store(servers.new_bucket(running.endpoint("moto"), "a/run"))),
    "hf": _hub(),
    "hf-prefix": _hub("a/run"),
    "seaweedfs": _plain(lambda path, running: open_store(running.in_one_bucket("seaweedfs"))),
}


@pytest.fixture
def hub(running: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """A stand-in Hub without faults, to which the environment leads."""
    found = running.hub()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    found.heal()
    yield found
    found.heal()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.seaweedfs if name == "seaweedfs" else ()) for name in STORES]
)
def store(request: pytest.FixtureRequest, tmp_path: Path, running: Servers) -> Iterator[Store]:
    """An empty store; the directory of the test is otherwise empty, too."""
    with STORES[request.param](tmp_path, running) as opened:
        yield opened
