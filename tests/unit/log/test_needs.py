"""Which blocks a reader asks for, alone and together with the others of its node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.log.needs import Needs
from vllm_delta_sync.wire.table import Block
from vllm_delta_sync.wire.tensors import TensorSpec


def block(start: int, count: int, name: str = "t") -> Block:
    spec = TensorSpec(name, "BF16", (1000,))
    return Block(0, spec, start, count, 1, 1, 0, 0, (1, 1), (1, 1), bytes(16))


@pytest.mark.parametrize(
    ("start", "count", "wanted"),
    [(0, 10, False), (0, 11, True), (19, 5, True), (20, 10, False), (20, 11, True), (40, 9, False), (5, 500, True)],
)
def test_a_block_is_wanted_when_one_of_its_elements_is(start: int, count: int, wanted: bool) -> None:
    assert Needs({"t": ((30, 40), (10, 20))}).wants(block(start, count)) == wanted


def test_of_other_tensors_nothing_is_wanted() -> None:
    assert not Needs({"t": ((0, 1000),)}).wants(block(0, 1000, "u"))
    assert not Needs({}).wants(block(0, 1000))
    assert Needs.everything().wants(block(3, 1))


ranges = st.dictionaries(
    st.sampled_from("tuv"),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(ranges, ranges, st.integers(0, 60), st.integers(1, 20), st.sampled_from("tuv"))
def test_together_they_want_what_one_of_them_wants(
    first: dict, second: dict, start: int, count: int, name: str
) -> None:  # type: ignore[type-arg]
    one, other = Needs(first), Needs(second)
    asked = block(start, count, name)
    elements = range(start, start + count)
    assert one.wants(asked) == any(a <= element < b for a, b in first.get(name, ()) for element in elements)
    assert one.with_those_of([other]).wants(asked) == (one.wants(asked) or other.wants(asked))


def test_halves_of_the_whole_model_are_everything_together() -> None:
    upper = Needs({"t": ((0, 500),), "u": ((0, 10),)}, 1010)
    lower = Needs({"t": ((500, 1000),), "u": ((0, 10),)}, 1010)
    assert upper.ranges is not None
    assert upper.with_those_of([lower]).ranges is None
    assert upper.with_those_of([Needs({"t": ((501, 1000),)}, 1010)]).ranges is not None
    assert upper.with_those_of([Needs.everything()]).ranges is None


@pytest.mark.parametrize("needs", [Needs({"t": ((0, 5), (7, 9))}, 12), Needs({}, 3), Needs.everything()])
def test_the_byte_form_is_read_back(needs: Needs) -> None:
    assert Needs.from_bytes(needs.to_bytes(), "here") == needs


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"elements":1}',
        b'{"elements":true,"ranges":null}',
        b'{"elements":-1,"ranges":null}',
        b'{"elements":1,"ranges":[]}',
        b'{"elements":1,"ranges":{"t":1}}',
        b'{"elements":1,"ranges":{"t":[1]}}',
        b'{"elements":1,"ranges":{"t":[[1,2,3]]}}',
        b'{"elements":1,"ranges":{"t":[[-1,2]]}}',
        b'{"elements":1,"ranges":{"t":[[1,2.0]]}}',
    ],
)
def test_anything_else_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(MalformedObject, match="here"):
        Needs.from_bytes(data, "here")
