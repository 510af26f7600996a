"""Walking a model once: every change that moves, adds or takes away a tensor is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spawnsim.policies.state.layout import Collector, StateScope, collect


class Nested(torch.nn.Module):
    """A model with children, buffers and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.scale = torch.nn.Parameter(torch.ones(3))


def _grow(model: Nested) -> None:
    model.more = torch.nn.Linear(1, 1)


def _exchange(model: Nested) -> None:
    model.wide = torch.nn.Linear(3, 2)


def _exchange_inside(model: Nested) -> None:
    model.wide.bias = torch.nn.Parameter(torch.ones(2))


def _move(model: Nested) -> None:
    model.wide.weight.data = torch.ones(2, 3)


def _shorten(model: Nested) -> None:
    model.scale.data = model.scale.data[:2]


def _drop(model: Nested) -> None:
    del model.norm


def _freeze(model: Nested) -> None:
    model.wide.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [_grow, _exchange, _exchange_inside, _move, _shorten, _drop, _freeze])
def test_a_collector_sees_every_change_of_a_model(change: Callable[[Nested], None]) -> None:
    """It walks a model once, and again only when other tensors or other memory would be found."""
    model, travels = Nested(), StateScope(frozen=False)
    collector = Collector(travels)
    first = collector(model, None)
    assert collector(model, None) is first
    change(model)
    second, fresh = collector(model, None), collect(model, None, travels)
    assert second is not first
    assert list(second) == list(fresh)
    assert all(second[name].data_ptr() == tensor.data_ptr() for name, tensor in fresh.items())
    assert all(second[name].numel() == tensor.numel() for name, tensor in fresh.items())


def test_a_collector_knows_models_apart() -> None:
    """A policy may be called with another model of the same kind."""
    collector, one, other = Collector(StateScope()), Nested(), Nested()
    assert collector(one, None)["parameter/scale"].data_ptr() == one.scale.data_ptr()
    assert collector(other, None)["parameter/scale"].data_ptr() == other.scale.data_ptr()


def _reshape(model: Nested) -> None:
    model.wide.weight.data = model.wide.weight.data.view(3, 2)


def _turn(model: Nested) -> None:
    model.square.data = model.square.data.t()


@pytest.mark.parametrize("change", [_grow, _exchange, _move, _shorten, _reshape, _turn])
def test_tensors_that_are_collected_as_they_are_keep_type_and_shape(change: Callable[[Nested], None]) -> None:
    """Complex ones too; and a change of the shape alone, or of the order in memory, is seen."""
    model, travels = Nested(), StateScope()
    model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.square = torch.nn.Parameter(torch.arange(4.0).view(2, 2))
    collector = Collector(travels, real=False)
    assert collector(model, None) is collector(model, None)
    change(model)
    found, fresh = collector(model, None), collect(model, None, travels)
    assert list(found) == list(fresh)
    assert all(torch.equal(found[name], tensor) for name, tensor in fresh.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in fresh.items())
