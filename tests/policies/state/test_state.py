"""What travels: any dtype, frozen, 0-dim, buffers, optimizer state; layouts, snapshots, replacements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.exchange.messages import Unreadable, decode
from spawnsim.policies.exchange.replacement import Contribution, Packer, Replacement
from spawnsim.policies.state.layout import (
    Entry,
    Layout,
    StateScope,
    Tensors,
    assign,
    assign_optimizer,
    collect,
)

Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


class Mixed(torch.nn.Module):
    """A model with one of everything."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.logZ = torch.nn.Parameter(torch.tensor(1.5))
        self.short = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(9), persistent=False)


def pair(width: int = 3, lr: float = 0.1) -> Pair:
    """Return a model and an optimizer that has made a step."""
    model = Mixed(width)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.wide.weight.grad = torch.ones_like(model.wide.weight)
    optimizer.step()
    return model, optimizer


def contribution(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, weight: float = 1.0, donor: int = 0
) -> Contribution:
    """Return the state of a donor."""
    live = collect(model, optimizer, StateScope(optimizer_state="copy"))
    return Contribution(donor, 0, weight, {name: tensor.clone() for name, tensor in live.items()})


def replaced(
    replacement: Replacement, whose: Pair, contributions: list[Contribution], reference: Tensors | None = None
) -> Pair:
    """Carry a replacement out."""
    new = replacement(*whose, contributions, reference=reference or {}, rng=np.random.default_rng(0))
    return new.model, new.optimizer


# ---------------------------------------------------------------------------------------------- collecting
def test_all_of_a_state_dict_travels_and_nothing_else() -> None:
    """Parameters (0-dim, bf16, complex, frozen) and persistent buffers; no scratch; parts can be left out."""
    names = {name.split("/", 1)[1] for name in collect(Mixed(), None, StateScope())}
    assert names == set(Mixed().state_dict())
    names = collect(Mixed(), None, StateScope(frozen=False, buffers=False))
    assert "parameter/logZ" in names
    assert "parameter/frozen" not in names
    assert not any(name.startswith("buffer/") for name in names)


def test_collected_tensors_are_the_model() -> None:
    """Views, not copies: writing them writes the model, in place."""
    model = Mixed()
    address = model.logZ.data_ptr()
    assign(collect(model, None, StateScope()), {"parameter/logZ": torch.tensor(7.0)})
    assert model.logZ.item() == 7
    assert model.logZ.data_ptr() == address


def test_optimizer_state_travels_by_parameter_name() -> None:
    """A fresh optimizer takes a donor's moments and step count."""
    model, optimizer = pair()
    fresh = Mixed()
    empty = torch.optim.Adam(fresh.parameters())
    assign_optimizer(fresh, empty, collect(model, optimizer, StateScope(optimizer_state="copy")))
    got, wanted = empty.state[fresh.wide.weight], optimizer.state[model.wide.weight]
    assert torch.equal(got["exp_avg"], wanted["exp_avg"])
    assert got["step"] == wanted["step"] == 1
    fresh.wide.weight.grad = torch.ones_like(fresh.wide.weight)
    empty.step()
    assert empty.state[fresh.wide.weight]["step"] == 2


# ------------------------------------------------------------------------------------------------- layouts
def test_layouts_are_known_by_names_dtypes_and_shapes() -> None:
    """Equal models have equal digests; a changed shape is named."""
    here, there = (Layout.of(collect(Mixed(width), None, StateScope())) for width in (3, 4))
    assert here.digest == Layout.of(collect(Mixed(), None, StateScope())).digest
    assert here.digest != there.digest
    assert "parameter/wide.weight is float32[2, 3] here and float32[2, 4] there" in here.difference(there)
    assert Layout.parse(here.text).digest == here.digest
    assert here is Layout.of(collect(Mixed(), None, StateScope()))  # all ranks share it


@pytest.mark.parametrize("text", [b"", b"{}", b"[[1]]", b'[["a", "save", [1]]]', b"\xff"])
def test_a_description_that_is_none_is_refused(text: bytes) -> None:
    """A foreign layout raises one clear error; names of torch functions are no dtypes."""
    if text == b"{}":
        assert Layout.parse(text).nbytes == 0
    else:
        with pytest.raises(UsageError, match="description"):
            Layout.parse(text)


def test_views_are_aligned_and_whole() -> None:
    """Each dtype has a segment of its own; views cover it without overlap."""
    live = collect(Mixed(), None, StateScope())
    layout = Layout.of(live)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    assign(layout.views(buffer), live)
    assert all(torch.equal(view, live[name]) for name, view in layout.views(buffer).items())
    assert all(offset % 64 == 0 for offset, _ in layout.segments.values())
    assert sum(flat.numel() for flat in layout.flat(buffer).values()) == sum(t.numel() for t in live.values())


def test_parts_hold_whole_tensors() -> None:
    """Splitting loses and cuts nothing; a tensor larger than the limit has a part of its own."""
    layout = Layout(Entry(str(i), torch.float32, (n,)) for i, n in enumerate([1, 2, 100, 1, 1]))
    parts = layout.split(16)
    assert [[entry.name for entry in part.entries] for part in parts] == [["0", "1"], ["2"], ["3", "4"]]


# ----------------------------------------------------------------------------------------------- snapshots
@pytest.mark.parametrize("limit", [1, 64, 10**9])
def test_a_snapshot_comes_back_bit_for_bit(limit: int) -> None:
    """In one part or many, in any dtype; later changes of the model do not reach it."""
    model, optimizer = pair()
    live = collect(model, optimizer, StateScope(optimizer_state="copy"))
    before = {name: tensor.clone() for name, tensor in live.items()}
    packer = Packer(limit)
    messages = [decode(buffer) for buffer in packer.pack(live, 3, 17)]
    with torch.no_grad():
        model.wide.weight.zero_()
    got = Packer(limit).unpack(messages)
    assert all(torch.equal(got[name], tensor) for name, tensor in before.items())
    assert len(messages) == messages[0].parts
    assert {(message.number, message.iteration) for message in messages} == {(3, 17)}


def test_a_part_of_the_wrong_size_is_unreadable() -> None:
    """A body that does not fit its description is dropped, not misread."""
    message = decode(Packer(10**9).pack({"a": torch.ones(40)}, 0, 0)[0][:-64])
    with pytest.raises(Unreadable, match="describes"):
        Packer(10**9).unpack([message])


# ------------------------------------------------------------------------------------------------ replacements
def test_without_a_builder_the_own_model_is_overwritten_in_place() -> None:
    """The objects stay; the values are the donor's."""
    whose, donor = pair(), pair()
    with torch.no_grad():
        donor[0].logZ.fill_(9)
    model, optimizer = replaced(Replacement(), whose, [contribution(*donor)])
    assert (model, optimizer) == whose
    states = (each.state_dict().values() for each in (model, donor[0]))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_with_a_builder_the_fresh_pair_is_returned_and_donors_keep_theirs() -> None:
    """New objects (with their own hyper-parameters), the donor's values, and no memory in common."""
    whose, donor = pair(), pair()
    model, optimizer = replaced(Replacement(lambda: pair(lr=0.5)), whose, [contribution(*donor)])
    assert model is not whose[0]
    assert optimizer.param_groups[0]["lr"] == 0.5
    addresses = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not addresses & {tensor.data_ptr() for tensor in donor[0].state_dict().values()}


@pytest.mark.parametrize(("how", "steps"), [("reset", None), ("keep", 2.0), ("copy", 5.0), ("average", 4.0)])
def test_optimizer_state_is_reset_kept_copied_or_averaged(how: str, steps: float | None) -> None:
    """The fresh optimizer starts anew, goes on, or takes over from donors (heaviest, or the mean)."""
    whose, one, two = pair(), pair(), pair()
    for (model, optimizer), step in ((whose, 2.0), (one, 3.0), (two, 5.0)):
        optimizer.state[model.wide.weight]["step"].fill_(step)
    contributions = [contribution(*one, 0.5, 1), contribution(*two, 0.5, 2)]
    if how == "copy":
        contributions = [contribution(*one, 0.4, 1), contribution(*two, 0.6, 2)]
    replacement = Replacement(pair, travels=StateScope(optimizer_state=how))
    model, optimizer = replaced(replacement, whose, contributions)
    state = optimizer.state.get(model.wide.weight)
    assert (float(state["step"]) if state else None) == steps


def test_models_of_different_shapes_are_matched_by_name() -> None:
    """What the donor has in the same shape is taken; the rest keeps its own value and is reported."""
    whose, donor = pair(width=3), pair(width=4)
    with torch.no_grad():
        donor[0].logZ.fill_(9)
        whose[0].wide.weight.fill_(4)
    rebuilt = Replacement(lambda: pair(width=3))
    new = rebuilt(*whose, [contribution(*donor)], reference={}, rng=np.random.default_rng(0))
    assert new.unmatched == ("parameter/wide.weight",)
    assert new.model.logZ.item() == 9
    assert (new.model.wide.weight == 4).all()


def test_momentum_and_delta_enter_a_replacement() -> None:
    """θ ← m·own + (1 - m)·(donor + own steps since asked)."""
    whose, donor = pair(), pair()
    replacement = Replacement(momentum=0.25, rule="delta")
    with torch.no_grad():
        whose[0].logZ.fill_(1.0)
        reference = replacement.reference(whose[0])
        whose[0].logZ.fill_(3.0)
        donor[0].logZ.fill_(10.0)
    model, _ = replaced(replacement, whose, [contribution(*donor)], reference)
    assert model.logZ.item() == pytest.approx(0.25 * 3 + 0.75 * (10 + 2))


def test_a_nan_model_is_healed_by_its_donor() -> None:
    """A diverged rank takes the donor's weights, whatever momentum and delta say."""
    whose, donor = pair(), pair()
    replacement = Replacement(momentum=0.5, rule="delta")
    reference = replacement.reference(whose[0])
    with torch.no_grad():
        whose[0].wide.weight.fill_(math.nan)
    model, _ = replaced(replacement, whose, [contribution(*donor)], reference)
    assert torch.isfinite(model.wide.weight).all()


def test_reset_weights_starts_afresh() -> None:
    """No donors: the builder's own values, and a fresh optimizer."""
    whose = pair()
    with torch.no_grad():
        whose[0].logZ.fill_(9)
    model, _ = replaced(Replacement(pair, "reset_weights"), whose, [])
    assert model.logZ.item() == 1.5


def test_explore_is_called_with_a_generator() -> None:
    """Exploit and explore in one line: population based training."""

    def explore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: np.random.Generator) -> None:
        optimizer.param_groups[0]["lr"] *= rng.choice([0.5, 2.0])

    _, optimizer = replaced(Replacement(explore=explore), pair(), [contribution(*pair())])
    assert optimizer.param_groups[0]["lr"] in (0.05, 0.2)


def test_bad_replacements_are_refused() -> None:
    """Strategy, momentum, rule, builder and optimizer state are checked where they are given."""
    for bad in ({"strategy": "median"}, {"momentum": 1.5}, {"rule": "add"}, {"strategy": "reset_weights"}):
        with pytest.raises(ParameterError):
            Replacement(**bad)
    with pytest.raises(ParameterError, match="optimizer_state"):
        StateScope(optimizer_state="lose")
