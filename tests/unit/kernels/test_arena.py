"""What waits on a device lies in memory that was set aside, and nowhere else; it gets there whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.kernels import upload
from vllm_delta_sync.kernels.arena import ALIGNED, Arena
from vllm_delta_sync.kernels.upload import Uploader

CPU = torch.device("cpu")
quick = settings(max_examples=40, deadline=None)
DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64]


@quick
@given(wanted=st.lists(st.tuples(st.integers(0, 900), st.sampled_from(DTYPES)), max_size=12), room=st.integers(0, 8000))
def test_cuts_are_aligned_share_no_byte_and_stay_within(wanted: list[tuple[int, torch.dtype]], room: int) -> None:
    arena = Arena(room, CPU)
    begin, used = arena._memory.data_ptr(), 0
    for count, dtype in wanted:
        at = -(-used // ALIGNED) * ALIGNED
        cut = arena.cut((count,), dtype)
        if at + count * dtype.itemsize > room:
            assert cut is None
            continue
        assert cut is not None and cut.shape == (count,) and cut.dtype == dtype
        assert not count or cut.data_ptr() == begin + at
        used = at + cut.nbytes


def test_a_cleared_arena_gives_the_same_memory_again_and_says_that_it_is_another_turn() -> None:
    arena = Arena(1024, CPU)
    first = arena.cut((4, 64), torch.int32)
    assert first is not None and arena.cut((1,), torch.uint8) is None and arena.turn == 0
    arena.clear()
    again = arena.cut((256,), torch.int32)
    assert again is not None and again.data_ptr() == first.data_ptr() and arena.turn == 1


@quick
@given(count=st.integers(0, 300), width=st.sampled_from([1, 2, 4, 8]), size=st.sampled_from([8, 64, 4096]))
def test_rows_of_any_length_get_there_whole_and_may_change_at_once(count: int, width: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "BUFFER_BYTES", size)
        uploader = Uploader(CPU)
        host = np.random.default_rng(count).integers(0, 256, count * width, np.uint8).view(upload.SIGNED[width])
        wanted, target = host.copy(), torch.empty(count, dtype=torch.from_numpy(host).dtype)
        for _ in range(2):  # it goes on with the buffer that is next
            uploader.copy(host, target)
        host[:] = 0
        np.testing.assert_array_equal(target.numpy(), wanted)
