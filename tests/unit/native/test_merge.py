"""Merging the changes of two versions: sums or overrides, whatever the width."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
widths = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])
changes = st.dictionaries(st.integers(0, 60), st.integers(1, 255), max_size=40)


def rows(found: dict[int, int], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    positions = sorted(found)
    return np.array(positions, np.uint32), np.array([found[at] for at in positions], dtype)


@quick
@given(first=changes, second=changes, dtype=widths, add=st.booleans())
def test_a_merge_is_that_of_two_dictionaries(
    native: ModuleType, first: dict[int, int], second: dict[int, int], dtype: type, add: bool
) -> None:
    if add:
        modulus = 1 << 8 * np.dtype(dtype).itemsize
        sums = {at: (first.get(at, 0) + second.get(at, 0)) % modulus for at in first.keys() | second.keys()}
        expected = {at: value for at, value in sums.items() if value}
    else:
        expected = first | second
    positions, values = native.merge(*rows(first, dtype), *rows(second, dtype), add=add)
    assert values.dtype == dtype
    assert dict(zip(positions.tolist(), values.tolist(), strict=True)) == expected
    assert positions.tolist() == sorted(expected)


def test_opposite_changes_vanish_whatever_their_number(native: ModuleType) -> None:
    positions, steps = np.arange(0, 100_000, 3, dtype=np.uint32), np.arange(1, 33_335, dtype=np.uint16)
    merged, sums = native.merge(positions, steps, positions, 0 - steps, add=True)
    assert merged.size == sums.size == 0


def test_lists_that_do_not_fit_are_refused(native: ModuleType) -> None:
    positions, values = np.zeros(2, np.uint32), np.zeros(2, np.uint16)
    with pytest.raises(ValueError, match="a value per position"):
        native.merge(positions, values[:1], positions, values, add=True)
    with pytest.raises(ValueError, match="one dtype"):
        native.merge(positions, values, positions, values.astype(np.uint32), add=True)
    with pytest.raises(TypeError, match="uint32"):
        native.merge(positions.astype(np.int64), values, positions, values, add=False)
