"""What is done for a device is done on it and on no other, whichever is the thread's; torch's rules are played here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from vllm_delta_sync import kernels
from vllm_delta_sync.kernels import backend as backends
from vllm_delta_sync.kernels.upload import Uploader
from vllm_delta_sync.native import Seed

SECOND = torch.device("cuda:1")


class Devices:
    """The devices as a new thread of a process that computes on the second one finds them."""

    def __init__(self) -> None:
        self.current = 0
        self.contexts = {1}  # devices on which this process holds a context

    def set(self, device: int) -> None:
        self.current = device
        self.contexts.add(device)  # as cudaSetDevice does since CUDA 12

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self.set(device.index)
        yield
        self.current = before  # torch sets it in earnest where there is a context only

    @contextmanager
    def stream(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self.set(device.index)
        yield
        self.set(before)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(torch.cuda, "device", found.device)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(backends, "_side_stream", lambda device: device)
    return found


def test_what_is_done_aside_leaves_no_context_on_the_device_that_a_thread_begins_with(devices: Devices) -> None:
    backend = kernels.select("reference", SECOND)
    with backend.aside():
        assert devices.current == 1
    assert devices.current == 0 and devices.contexts == {1}


def test_triton_launches_on_the_device_that_it_was_selected_for(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: object) -> torch.Tensor:
        return torch.tensor(devices.current)

    monkeypatch.setattr(kernels.triton, "why_not", lambda device: None)
    monkeypatch.setattr(kernels.triton, "write", launch)
    monkeypatch.setattr(kernels.triton, "state_hash", launch)
    backend, row = kernels.select("triton", SECOND), torch.zeros(1)
    patch = kernels.Prepared((), row, row, row, row)
    assert int(backend.write(patch)) == int(backend.state_hash(row, 0, Seed(0, 0))) == 1 and devices.current == 0


class Event:
    """Remembers where it was recorded."""

    stream: object = None

    def record(self, stream: object = None) -> None:
        self.stream = stream or torch.cuda.current_stream()

    def synchronize(self) -> None:
        pass


def test_a_pinned_buffer_waits_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device="cuda:0": f"stream of {device}")
    uploader = Uploader(torch.device("cpu"))
    uploader._device, uploader._read = SECOND, [Event(), Event()]
    uploader.copy(np.zeros(3, np.uint16), torch.empty(3, dtype=torch.int16))
    assert [event.stream for event in uploader._read] == [None, "stream of cuda:1"]
