"""Composed changes are what their parts do one after the other, whatever the dtypes, codecs and cuts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync import native
from vllm_delta_sync.errors import BaseNeeded, VersionGap
from vllm_delta_sync.log import layers
from vllm_delta_sync.log.compose import Held, hold
from vllm_delta_sync.log.layers import Changed, End, Layer
from vllm_delta_sync.wire import dtypes, state_hash
from vllm_delta_sync.wire.codec_rules import DENSE, GAP, GAP_ABS, SLACK_BYTES
from vllm_delta_sync.wire.codecs import decode_encoded, dense_block, encode_block
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.sparse import gap_abs_block
from vllm_delta_sync.wire.tensors import TensorSpec

Model = dict[str, tuple[TensorSpec, np.ndarray]]

SPECS = tuple(
    TensorSpec(f"t.{name}", name, shape)
    for name, shape in (("BF16", (40, 8)), ("F16", (97,)), ("F32", (31,)), ("F64", (9,)), ("U8", (64,)), ("BOOL", (5,)))
)


def end(version: int, model: Model) -> End:
    root = state_hash.state_root({spec: state_hash.of_tensor(spec, bits) for spec, bits in model.values()})
    return End(version, root, ObjectRef(key=f"versions/{version}", sha256="0" * 64, size=2))


def random_model(rng: np.random.Generator) -> Model:
    return {
        spec.name: (spec, rng.integers(0, 256, spec.nbytes, np.uint8).view(dtypes.by_name(spec.dtype).bits))
        for spec in SPECS
    }


def walked(model: Model, rng: np.random.Generator) -> Model:
    """A copy in which tensors move a little, wholly, or not at all, and sometimes back to a round value."""
    new = {name: (spec, bits.copy()) for name, (spec, bits) in model.items()}
    for _, bits in new.values():
        where = rng.random(bits.size) < rng.choice([0.0, 0.05, 0.4, 1.0])
        bits[where] ^= bits.dtype.type(rng.choice([1, 1, 3, 127]))
    return new


def encoded(
    spec: TensorSpec, start: int, changes: native.Changes, part: np.ndarray, codec: int | None, *, remember: bool
) -> Held:
    """A block in the codec asked for, if its dtype has it; `remember`: with the steps beside it as a publisher has."""
    if codec == DENSE:
        block = dense_block(part, changes.positions.size)
    elif codec == GAP_ABS:
        block = gap_abs_block(changes.positions, changes.new)
    else:
        block = encode_block(spec, changes, start, part.size, part)
    held = hold(spec, start, part.size, block, changes)
    return held if remember else Held(start, part.size, block)


def layer(
    version: int,
    old: Model,
    new: Model,
    rng: np.random.Generator | None = None,
    codecs: tuple[int | None, ...] = (None,),
    *,
    remember: bool = False,
) -> Layer:
    """The changes of one version; with `rng`, cut at random places and in codecs drawn from `codecs`."""
    tensors = {}
    for name, (spec, bits) in new.items():
        cuts = [0, spec.numel]
        if rng is not None:
            cuts = sorted({0, spec.numel, *rng.integers(0, spec.numel + 1, rng.integers(0, 3)).tolist()})
        found = []
        for start, stop in pairwise(cuts):
            changes = native.diff(old[name][1][start:stop].copy(), bits[start:stop], advance=False)
            if changes.positions.size:
                codec = codecs[rng.integers(len(codecs))] if rng is not None else codecs[0]
                found.append(encoded(spec, start, changes, bits[start:stop], codec, remember=remember))
        if found:
            tensors[name] = Changed(spec, state_hash.of_tensor(spec, bits), found)
    return Layer(end(version - 1, old), end(version, new), tensors)


def applied(model: Model, change: Layer) -> Model:
    """The model after a layer, by its wire bytes alone and proven by its state hashes."""
    new = {name: (spec, bits.copy()) for name, (spec, bits) in model.items()}
    for update in change.updates():
        spec, bits = new[update.spec.name]
        for start, count, block in update.blocks:
            found = decode_encoded(spec, start, count, block, spec.name)
            part = bits[start : start + count]
            part[found.positions] = found.new_bits(part[found.positions])
        assert np.array_equal(state_hash.of_tensor(spec, bits), update.lanes)
    return new


def assert_same(found: Model, expected: Model) -> None:
    for name, (_, bits) in expected.items():
        np.testing.assert_array_equal(found[name][1], bits, err_msg=name)


def acceptable(held: Held, spec: TensorSpec) -> bool:
    """Whether a reader takes the block: no sparse one is much larger than its dense copy."""
    return held.encoded.stored <= held.count * spec.width + SLACK_BYTES


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32), length=st.integers(2, 5), remember=st.booleans())
def test_a_composed_layer_does_what_its_parts_do(seed: int, length: int, remember: bool) -> None:
    rng = np.random.default_rng(seed)
    # Without the steps that only a publisher knows, a tensor must keep to one kind of codec.
    codecs = (None, GAP_ABS, DENSE) if remember else (DENSE,) if rng.random() < 0.5 else (None,)
    models = [random_model(rng)]
    parts = []
    for version in range(1, length + 1):
        models.append(walked(models[-1], rng))
        parts.append(layer(version, models[-2], models[-1], rng, codecs, remember=remember))
    together = parts[0]
    for part in parts[1:]:
        together = layers.compose(together, part, threads=2)
    assert_same(applied(models[0], together), models[-1])
    assert (together.source.version, together.to.version) == (0, length)
    for tensor in together.tensors.values():
        for held in tensor.blocks:
            assert held.encoded.codec != DENSE or held.encoded.changed == held.count
            assert acceptable(held, tensor.spec)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_composition_is_associative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [random_model(rng)]
    for _ in range(3):
        models.append(walked(models[-1], rng))
    one, two, three = (layer(v, models[v - 1], models[v], rng, remember=True) for v in (1, 2, 3))
    left = layers.compose(layers.compose(one, two), three)
    right = layers.compose(one, layers.compose(two, three))
    assert_same(applied(models[0], left), applied(models[0], right))


def test_what_comes_back_is_not_listed() -> None:
    rng = np.random.default_rng(3)
    first = random_model(rng)
    second = {name: (spec, bits.copy()) for name, (spec, bits) in first.items()}
    second["t.BF16"][1][5:300:3] ^= 7
    second["t.F16"][1][4] ^= 1
    third = {name: (spec, bits.copy()) for name, (spec, bits) in first.items()}
    third["t.F16"][1][4] ^= 2
    together = layers.compose(layer(1, first, second), layer(2, second, third))
    assert list(together.tensors) == ["t.F16"]
    assert [held.encoded.changed for held in together.tensors["t.F16"].blocks] == [1]
    assert_same(applied(first, together), third)


def test_steps_after_values_of_the_same_elements_become_values() -> None:
    rng = np.random.default_rng(4)
    first = random_model(rng)
    second, third = ({name: (spec, bits.copy()) for name, (spec, bits) in first.items()} for _ in range(2))
    for model, where, flip in ((second, slice(0, 90, 2), 5), (third, slice(0, 90, 4), 9)):
        model["t.F16"][1][where] ^= np.uint16(flip)
    third["t.F16"][1][2:90:4] = second["t.F16"][1][2:90:4]
    values = layer(1, first, second, codecs=(GAP_ABS,))
    steps = layer(2, second, third)
    assert {held.encoded.codec for held in steps.tensors["t.F16"].blocks} == {GAP}
    assert_same(applied(first, layers.compose(values, steps)), third)


def test_a_step_from_an_unknown_value_beside_known_ones_needs_the_base() -> None:
    rng = np.random.default_rng(5)
    first = random_model(rng)
    second, third = ({name: (spec, bits.copy()) for name, (spec, bits) in first.items()} for _ in range(2))
    second["t.F16"][1][:40] ^= 5
    third["t.F16"][1][:40] ^= 5
    third["t.F16"][1][50:60] ^= 1
    values = layer(1, first, second, codecs=(GAP_ABS,))
    steps = layer(2, second, third)
    with pytest.raises(BaseNeeded, match="unknown"):
        layers.compose(values, steps)
    remembered = layer(1, first, second, codecs=(GAP_ABS,), remember=True)
    assert_same(applied(first, layers.compose(remembered, steps)), third)


def test_a_fold_that_would_be_larger_than_the_tensor_needs_the_base() -> None:
    spec = TensorSpec("noise", "BF16", (4000,))
    rng = np.random.default_rng(6)
    models: list[Model] = [{"noise": (spec, rng.integers(0, 1 << 16, spec.numel).astype(np.uint16))}]
    halves = (slice(0, 2000), slice(2000, 4000))
    for half in halves:
        bits = models[-1]["noise"][1].copy()
        bits[half] = rng.integers(0, 1 << 16, 2000)
        models.append({"noise": (spec, bits)})
    parts = []
    for version in (1, 2):
        old, new = models[version - 1]["noise"][1], models[version]["noise"][1]
        changes = native.diff(old.copy(), new, advance=False)
        held = hold(spec, 0, 4000, dense_block(new, changes.positions.size), changes)
        assert held.steps is not None
        bare = Changed(spec, state_hash.of_tensor(spec, new), [Held(0, 4000, held.steps)])
        parts.append(Layer(end(version - 1, models[version - 1]), end(version, models[version]), {"noise": bare}))
    with pytest.raises(BaseNeeded, match="more than the 8000 of the whole block"):
        layers.compose(*parts)


def test_layers_compose_only_end_to_end() -> None:
    rng = np.random.default_rng(7)
    models = [random_model(rng)]
    for _ in range(2):
        models.append(walked(models[-1], rng))
    one, two = (layer(v, models[v - 1], models[v]) for v in (1, 2))
    with pytest.raises(VersionGap):
        layers.compose(two, one)
    elsewhere = layer(2, models[0], models[2])
    with pytest.raises(VersionGap):
        layers.compose(one, elsewhere)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_an_inverse_leads_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = {name: tensor for name, tensor in random_model(rng).items() if dtypes.by_name(tensor[0].dtype).half}
    second = walked(first, rng)
    forth = layer(1, first, second, rng, (None, DENSE), remember=True)
    back = layers.inverse(forth, {name: state_hash.of_tensor(*tensor) for name, tensor in first.items()})
    assert (back.source.version, back.to.version) == (1, 0)
    assert_same(applied(second, back), first)


def test_values_have_no_inverse_of_their_own() -> None:
    rng = np.random.default_rng(8)
    first = random_model(rng)
    second = {name: (spec, bits.copy()) for name, (spec, bits) in first.items()}
    second["t.F32"][1][3] ^= 1
    forth = layer(1, first, second)
    with pytest.raises(BaseNeeded, match="old ones"):
        layers.inverse(forth, {name: state_hash.of_tensor(*tensor) for name, tensor in first.items()})
    back = layers.between(forth.to, forth.source, second, first)
    assert list(back.tensors) == ["t.F32"]
    assert_same(applied(second, back), first)
