"""Loaders in miniature: what the trace makes of each, and that none of them reaches live memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from vllm_delta_sync.errors import UnsupportedLayout
from vllm_delta_sync.serving.layout import Layout, trace
from vllm_delta_sync.wire.tensors import TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[["Model", str, torch.Tensor], object]


class Model(torch.nn.Module):
    """Two matrices, a bias and a buffer, loaded by a function of (model, name, tensor)."""

    def __init__(self, loader: Loader, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.loader = loader
        self.w = torch.nn.Parameter(torch.randn(4, 6).to(dtype), requires_grad=False)
        self.v = torch.nn.Parameter(torch.randn(8, 6).to(dtype), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(4).to(dtype), requires_grad=False)
        self.register_buffer("cache", torch.randn(3))
        self.side = torch.randn(4, 6).to(dtype)  # a tensor that is neither parameter nor buffer

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.loader(self, name, tensor)

    def digest(self) -> str:
        tensors = [self.w, self.v, self.bias, self.cache, self.side]
        return hashlib.sha256(b"".join(t.data.view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


W = spec("w", 4, 6)


def traced(loader: Loader, *specs: TensorSpec, dtype: torch.dtype = torch.bfloat16) -> tuple[Layout, Model]:
    """Trace, and check that live memory is what and where it was."""
    model = Model(loader, dtype)
    digest, address = model.digest(), model.w.data_ptr()
    layout = trace(model, specs or (W,))
    assert model.digest() == digest
    assert model.w.data_ptr() == address
    layout.flat_tensors(model)
    return layout, model


def read_back(layout: Layout, model: Model, tensor: str, numel: int) -> list[float | None]:
    """The checkpoint tensor as live memory holds it; None where no region does."""
    flat = layout.flat_tensors(model)
    values: list[float | None] = [None] * numel
    for region in layout.regions:
        if region.tensor == tensor:
            for index in np.ndindex(*region.sizes):
                at = region.source_offset + int(np.dot(index, region.source_strides))
                live = region.target_offset + int(np.dot(index, region.target_strides))
                values[at] = float(flat[region.storage][live])
    return values


def test_a_plain_copy_is_one_region() -> None:
    layout, model = traced(lambda m, _, t: m.w.data.copy_(t))
    assert (len(layout.regions), layout.unmapped, layout.unsupported) == (1, (), ())
    assert read_back(layout, model, "w", 24) == model.w.flatten().float().tolist()
    (storage,) = layout.storages
    assert (storage.name, storage.address, storage.numel) == ("w", model.w.data_ptr(), 24)


@pytest.mark.parametrize(
    "loader",
    [
        lambda m, _, t: m.w.copy_(t),
        lambda m, _, t: m.w.data.copy_(t.view(-1).view(4, 6)),
        lambda m, _, t: m.w.data.t().copy_(t.t()),
        lambda m, _, t: [a.copy_(b) for a, b in zip(m.w.data.chunk(2, 1), t.chunk(2, 1), strict=True)],
        lambda m, _, t: [m.w.data.select(0, i).copy_(t[i]) for i in range(4)],
        lambda m, _, t: [m.w.data.narrow(0, i, 1).copy_(t.narrow(0, i, 1)) for i in range(4)],
        lambda m, _, t: m.w.data.__setitem__(slice(None), t),
        lambda m, _, t: m.w.data.copy_(t.clone()),
        lambda m, _, t: m.w.data.copy_(t.to("cpu")),
        lambda m, _, t: [a.copy_(b) for a, b in zip(m.w.data.unbind(1), t.contiguous().clone().unbind(1), strict=True)],
        lambda m, _, t: m.w.data.copy_(t.unsqueeze(0)[0]),
    ],
)
def test_views_on_either_side_are_followed(loader: Loader) -> None:
    layout, model = traced(loader)
    assert layout.unsupported == ()
    assert read_back(layout, model, "w", 24) == model.w.flatten().float().tolist()


def test_a_part_of_a_clone_is_followed_to_where_it_came_from() -> None:
    layout, model = traced(lambda m, _, t: m.w.data[1:].copy_(t[1:].clone()))
    assert read_back(layout, model, "w", 24) == [None] * 6 + model.w[1:].flatten().float().tolist()


def test_one_name_may_go_to_several_places_and_several_names_to_one_parameter() -> None:
    def loader(model: Model, name: str, tensor: torch.Tensor) -> None:
        model.v.data[: 4 if name == "a" else None][-4:].copy_(tensor)
        model.w.data.copy_(tensor) if name == "a" else None

    layout, model = traced(loader, spec("a", 4, 6), spec("b", 4, 6))
    assert [region.tensor for region in layout.regions] == ["a", "a", "b"]
    assert read_back(layout, model, "b", 24) == model.v[4:].flatten().float().tolist()


def test_a_loader_that_buffers_is_attributed_by_storage_not_by_the_name_at_hand() -> None:
    class Buffering(Model):
        def load_weights(self, weights: Weights) -> None:
            for name, tensor in list(weights)[::-1]:
                (self.w if name == "w" else self.bias).data.copy_(tensor)

    model = Buffering(lambda *_: None)
    layout = trace(model, [W, spec("b", 4)])
    assert {region.tensor: layout.storages[region.storage].name for region in layout.regions} == {"w": "w", "b": "bias"}


def test_a_tensor_copied_nowhere_is_unmapped() -> None:
    layout, _ = traced(lambda m, n, t: m.w.data.copy_(t) if n == "w" else None, W, spec("x", 3), spec("none", 0))
    assert (layout.unmapped, layout.unsupported) == (("x",), ())


def test_padding_filled_beside_or_before_the_copy_is_harmless_and_not_done() -> None:
    def loader(model: Model, _: str, tensor: torch.Tensor) -> None:
        model.v.data.zero_()
        model.v[:4].data.copy_(tensor)
        model.v[4:].data.fill_(0)

    layout, model = traced(loader)
    assert layout.unsupported == ()
    assert read_back(layout, model, "w", 24) == model.v[:4].flatten().float().tolist()


def test_columns_padded_beside_the_copy_are_harmless() -> None:
    def loader(model: Model, _: str, tensor: torch.Tensor) -> None:
        model.w.data[:, :4].copy_(tensor)
        model.w.data[:, 4:].fill_(1)

    assert traced(loader, spec("w", 4, 4))[0].unsupported == ()


def test_a_source_zeroed_on_this_rank_is_a_constant_held_elsewhere() -> None:
    layout, _ = traced(lambda m, _, t: m.bias.data.copy_(t.zero_()), spec("b", 4))
    assert (layout.regions, layout.unmapped, layout.unsupported) == ((), ("b",), ())


def test_a_widened_half_float_is_a_copy_and_says_what_it_became() -> None:
    layout, _ = traced(lambda m, _, t: m.w.data.copy_(t), dtype=torch.float32)
    assert [region.target_dtype for region in layout.regions] == ["F32"]


def dtype_loader(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)


def exp_in_place(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w.data.copy_(-torch.exp(m.w.float()))


def zero_after(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w.data[0].zero_()


def copy_on(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.v.data[:4].copy_(m.w.data)


def through_a_buffer(m: Model, _: str, t: torch.Tensor) -> None:
    buffer = torch.empty(4, 6, dtype=torch.bfloat16)
    buffer[1:].copy_(t[1:])
    m.w.data.copy_(buffer[:])


def scatter(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data[torch.tensor([0, 2])] = t[:2]


def clone_changed(m: Model, _: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t.clone().mul_(2))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda m, _, t: m.w.data.copy_(t.float()), "computed, not copied"),
        (lambda m, _, t: m.w.data.copy_(t * 2), "computed, not copied"),
        (lambda m, _, t: m.w.data.copy_(t + m.w), "computed, not copied"),
        (lambda m, _, t: m.w.data.copy_(torch.cat([t[2:], t[:2]])), "computed, not copied"),
        (lambda m, _, t: m.w.data.copy_(t.view(6, 4).t().contiguous()), "computed, not copied"),
        (lambda m, _, t: m.w.data.add_(t), "computed, not copied"),
        (lambda m, _, t: torch.add(t, 1, out=m.w.data), "computed, not copied"),
        (scatter, "computed, not copied"),
        (through_a_buffer, "computed, not copied"),
        (clone_changed, "computed, not copied"),
        (lambda m, _, t: m.w.data.copy_(t.div_(2)), "changes it in place"),
        (lambda m, _, t: m.w.data.copy_(t[0].zero_()), "changes it in place"),
        (lambda m, _, t: m.w.data.view(torch.int16).copy_(t), "not its type"),
        (lambda m, _, t: m.w.data.view(torch.int16).copy_(t.view(torch.int16)), "not its type"),
        (lambda m, _, t: m.w.data.copy_(t[0]), "one checkpoint element to 4 places"),
        (lambda m, _, t: m.side.copy_(t), "no parameter or buffer"),
        (exp_in_place, "rewritten after it was copied"),
        (zero_after, "rewritten after it was copied"),
        (copy_on, "computes parts of v from it"),
    ],
)
def test_a_tensor_that_is_not_plainly_copied_is_unsupported_by_name(loader: Loader, why: str) -> None:
    layout, _ = traced(loader)
    ((name, reason),) = layout.unsupported
    assert name == "w" and why in reason
    assert (layout.regions, layout.unmapped) == ((), ())


@pytest.mark.parametrize(("published", "served"), [("F32", torch.bfloat16), ("BF16", torch.float16)])
def test_a_conversion_that_loses_bits_is_unsupported(published: str, served: torch.dtype) -> None:
    layout, _ = traced(dtype_loader, spec("w", 4, 6, dtype=published), dtype=served)
    assert "bits served would not be those published" in dict(layout.unsupported)["w"]


def test_two_tensors_copied_to_the_same_elements_are_both_unsupported_and_others_are_not() -> None:
    def loader(model: Model, name: str, tensor: torch.Tensor) -> None:
        (model.bias if name == "b" else model.w).data.copy_(tensor)

    layout, _ = traced(loader, spec("embed", 4, 6), spec("b", 4), spec("head", 4, 6))
    assert [name for name, _ in layout.unsupported] == ["embed", "head"]
    assert [region.tensor for region in layout.regions] == ["b"]


def test_the_same_copy_twice_is_one_region() -> None:
    layout, _ = traced(lambda m, _, t: [m.w.data.copy_(t) for _ in range(2)])
    assert len(layout.regions) == 1


def value_of_a_buffer(m: Model, _: str, t: torch.Tensor) -> None:
    buffer = torch.empty(4, 6, dtype=torch.bfloat16)
    buffer.copy_(t)
    m.w.data.fill_(buffer[0, 0].item())


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda m, _, t: m.w.data.fill_(t.sum().item()), r"just after w: RuntimeError: .*item\(\)"),
        (value_of_a_buffer, r"just after w: UnsupportedLayout: the loader looks at values of w"),
    ],
)
def test_a_loader_that_needs_values_is_refused_with_the_tensor_it_was_given(loader: Loader, why: str) -> None:
    with pytest.raises(UnsupportedLayout, match=why):
        traced(loader)


def test_a_loader_that_fails_is_refused_with_its_own_error() -> None:
    with pytest.raises(UnsupportedLayout, match="AssertionError: shapes") as caught:
        traced(dtype_loader_that_asserts, spec("w", 5, 6))
    assert isinstance(caught.value.__cause__, AssertionError)


def dtype_loader_that_asserts(m: Model, _: str, t: torch.Tensor) -> None:
    assert m.w.shape == t.shape, "shapes"


def test_parameters_that_a_loader_replaces_are_put_back_and_the_loader_refused() -> None:
    def rebind(m: Model, _: str, __: torch.Tensor) -> None:
        m.w.data = torch.zeros(4, 6, dtype=torch.bfloat16)

    def register(m: Model, _: str, __: torch.Tensor) -> None:
        m.v = torch.nn.Parameter(torch.zeros(1))

    for loader in (rebind, register):
        model = Model(loader)
        before, digest, v = model.w.data_ptr(), model.digest(), model.v
        with pytest.raises(UnsupportedLayout, match="replaces"):
            trace(model, [W])
        assert (model.w.data_ptr(), model.digest()) == (before, digest)
        assert model.v is v


def test_a_parameter_that_moved_after_the_trace_is_noticed() -> None:
    layout, model = traced(lambda m, _, t: m.w.data.copy_(t))
    places = layout.places(model)
    places.assert_unmoved()
    was = model.w.data
    model.w.data = was.clone()
    with pytest.raises(UnsupportedLayout, match="restart the server"):
        places.assert_unmoved()
    with pytest.raises(UnsupportedLayout, match="trace again"):
        layout.flat_tensors(model)
    model.w.data = was
    places.assert_unmoved()
    model.w = torch.nn.Parameter(was, requires_grad=False)
    with pytest.raises(UnsupportedLayout, match="restart the server"):
        places.assert_unmoved()


def test_a_model_on_the_meta_device_has_the_same_regions() -> None:
    def loader(m: Model, name: str, t: torch.Tensor) -> None:
        (m.v.data[2:6] if name == "w" else m.v.data[:2]).copy_(t)

    specs = [W, spec("top", 2, 6)]
    live, _ = traced(loader, *specs)
    assert trace(Model(loader).to("meta"), specs).regions == live.regions


def test_thousands_of_experts_filled_and_then_copied_one_by_one_are_followed() -> None:
    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.zeros(2000, 4, 6, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                self.experts.data[int(name)].zero_()
                self.experts.data[int(name)].copy_(tensor)

    layout = trace(Many(), [spec(str(i), 4, 6) for i in range(2000)])
    assert len(layout.regions) == 2000 and layout.unsupported == ()
