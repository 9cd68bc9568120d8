"""Memory moves to huge pages where the system lets it, and holds what it held."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_delta_sync.native import huge_pages

ARRAYS = 32
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def able() -> bool:
    """Whether this system moves memory when it is asked to: Linux does since 6.1, unless it is told not to."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return sys.platform == "linux" and release >= (6, 1) and SWITCH.is_file() and "[never]" not in SWITCH.read_text()


def on_huge_pages(array: np.ndarray) -> int:
    """Bytes of the mapping that an array lies in, as Linux counts them."""
    address, inside = array.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0


@pytest.fixture
def memory() -> list[np.ndarray]:
    """Arrays of half a huge page, which no allocator puts there by itself."""
    return [np.arange(huge_pages.SIZE // 8, dtype=np.uint32) for _ in range(ARRAYS)]


@pytest.mark.skipif(not able(), reason="this system does not move memory to huge pages, which Linux does since 6.1")
def test_memory_moves_and_holds_what_it_held(memory: list[np.ndarray]) -> None:
    moved = huge_pages.prefer((row.ctypes.data, row.nbytes) for row in memory)
    assert all((row == np.arange(row.size)).all() for row in memory)
    assert moved >= ARRAYS // 2 * huge_pages.SIZE // 2
    assert max(map(on_huge_pages, memory)) > 0


def test_where_the_system_forbids_it_nothing_moves(
    memory: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "enabled"
    switch.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_SWITCH", switch)
    assert huge_pages.prefer((row.ctypes.data, row.nbytes) for row in memory) == 0
    monkeypatch.setattr(huge_pages, "_SWITCH", tmp_path / "absent")
    assert huge_pages.prefer((row.ctypes.data, row.nbytes) for row in memory) == 0


def test_what_is_no_memory_is_passed_over() -> None:
    assert huge_pages.prefer([(huge_pages.SIZE, 1), (1 << 46, huge_pages.SIZE)]) == 0
