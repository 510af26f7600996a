"""The distributed toolkit's promises, as checks that any four ranks can run together: see tests/distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spawnsim.comm import BYTE, Status
from spawnsim.errors import MismatchError, UnsupportedError
from spawnsim.torchgfn import distributed as toolkit

Check = Callable[[Any], None]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64)


def sample(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5), seed: int = 0) -> torch.Tensor:
    """Return numbers with fractions and signs, as far as the dtype has them."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * 10).to(dtype)


def neighbours(comm: Any) -> tuple[int, int]:
    """Return the ranks to the left and to the right in the ring."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return (rank - 1) % size, (rank + 1) % size


def round_the_ring(comm: Any, tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return what the left neighbour passed, as bytes."""
    left, right = neighbours(comm)
    handle = toolkit.isend(tensor, right, group=comm, **how)
    source, raw = toolkit.recv(left, group=comm, **how)
    handle.wait()
    assert source == left
    assert raw.dtype == torch.uint8
    return raw


def refusal(call: Callable[[], object]) -> str:
    """Return what the MismatchError of a call says."""
    try:
        call()
    except MismatchError as error:
        return str(error)
    raise AssertionError("what does not fit together was taken")


# ---------------------------------------------------------------------------------------------------------- bytes
def bytes_travel_unchanged(comm: Any) -> None:
    """D1: floats of any dtype arrive to the last bit, also 0-dim, empty, strided and boolean tensors."""
    given = [sample(dtype, seed=comm.Get_rank()) for dtype in DTYPES]
    given += [torch.tensor(-0.5), torch.empty(0), sample(torch.float32, seed=comm.Get_rank()).T[:, ::2]]
    left, _ = neighbours(comm)
    expected = [sample(dtype, seed=left) for dtype in DTYPES]
    expected += [torch.tensor(-0.5), torch.empty(0), sample(torch.float32, seed=left).T[:, ::2]]
    for mine, theirs in zip(given, expected, strict=True):
        raw = round_the_ring(comm, mine)
        assert torch.equal(raw.view(theirs.dtype).reshape(theirs.shape), theirs)


def both_backends_send_the_same_bytes(comm: Any) -> None:
    """D2: one message of n·itemsize bytes on both, which an ordinary receive of bytes takes as well."""
    tensor = sample(torch.float32)
    assert torch.equal(*(round_the_ring(comm, tensor, backend=name) for name in ("mpi", "torch")))
    left, right = neighbours(comm)
    for name in ("mpi", "torch"):
        handle = toolkit.isend(tensor, right, name, 5, group=comm)
        place, status = bytearray(1000), Status()
        comm.Recv(place, left, 5, status)
        handle.wait()
        assert place[: status.Get_count(BYTE)] == tensor.numpy().tobytes()


def a_ring_of_isends_does_not_deadlock(comm: Any) -> None:
    """D3: all send 2 MB first, and receive then."""
    raw = round_the_ring(comm, torch.full((500_000,), float(comm.Get_rank())))
    assert raw.view(torch.float32).unique().tolist() == [neighbours(comm)[0]]


def completion_shows_without_waiting(comm: Any) -> None:
    """D4: `is_complete` turns True by polling, once the message has been taken."""
    left, right = neighbours(comm)
    handle = toolkit.isend(torch.ones(500_000), right, group=comm)
    toolkit.recv(left, group=comm)
    polls = 0
    while not handle.is_complete():
        comm.clock.sleep(1e-3)
        polls += 1
        assert polls < 10_000
    handle.wait()


def what_was_given_may_change_at_once(comm: Any) -> None:
    """The bytes sent are those at the time of the call; a dropped handle loses nothing."""
    left, right = neighbours(comm)
    for value in range(3):
        tensor = torch.full((100_000,), float(value))
        toolkit.isend(tensor, right, group=comm)
        tensor.fill_(-1)
    got = [toolkit.recv(left, group=comm)[1].view(torch.float32) for _ in range(3)]
    assert [part.unique().tolist() for part in got] == [[0.0], [1.0], [2.0]]


def several_receivers_on_one_rank_get_whole_messages(comm: Any) -> None:
    """D5: two tasks of rank 0 take messages of different lengths from anyone; none is cut or lost."""
    size, rank, each = comm.Get_size(), comm.Get_rank(), 10
    if rank:
        for number in range(each):
            toolkit.send(torch.full((100 * rank + number,), rank, dtype=torch.uint8), 0, group=comm)
    else:
        got: list[tuple[int, torch.Tensor]] = []
        half = (size - 1) * each // 2

        def take() -> None:
            got.extend(toolkit.recv(group=comm) for _ in range(half))

        tasks = [comm.background(take) for _ in range(2)]
        assert all(task.join(20) for task in tasks)
        assert all(raw.unique().tolist() == [source] for source, raw in got)
        lengths = sorted(raw.numel() for _, raw in got)
        assert lengths == sorted(100 * r + number for r in range(1, size) for number in range(each))


def groups_have_their_own_ranks(comm: Any) -> None:
    """D6: `send` and `recv` number ranks in the group that is given."""
    part = comm.Split(comm.Get_rank() // 2, 0)
    if part.Get_rank() == 0:
        toolkit.send(torch.tensor([comm.Get_rank()]), 1, group=part)
    else:
        source, raw = toolkit.recv(group=part)
        assert (source, raw.view(torch.int64).item()) == (0, comm.Get_rank() - 1)


# ---------------------------------------------------------------------------------------------------- collectives
def broadcast_counts_in_the_group(comm: Any) -> None:
    """D7: `src` is the same rank on both backends."""
    part = comm.Split(comm.Get_rank() // 2, 0)
    for backend in ("mpi", "torch"):
        tensor = torch.tensor(float(comm.Get_rank()))
        toolkit.broadcast(tensor, 1, backend, part)
        assert tensor.item() == comm.Get_rank() // 2 * 2 + 1


def collectives_take_every_dtype(comm: Any) -> None:
    """D8: bfloat16 and all others are gathered and broadcast to the last bit, strided ones too."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for dtype in DTYPES:
        places = [torch.empty((5, 3), dtype=dtype) for _ in range(size)]
        toolkit.all_gather(places, sample(dtype, seed=rank).T, group=comm)
        assert all(torch.equal(place, sample(dtype, seed=r).T) for r, place in enumerate(places))
        tensor = sample(dtype, seed=rank)[:, ::2]
        toolkit.broadcast(tensor, size - 1, group=comm)
        assert torch.equal(tensor, sample(dtype, seed=size - 1)[:, ::2])


def reductions_take_every_dtype(comm: Any) -> None:
    """D8: SUM, MAX and MIN in place; half precision is summed in float32 and rounded once."""
    size = comm.Get_size()
    for dtype in DTYPES:
        all_of_them = torch.stack([sample(dtype, seed=rank) for rank in range(size)])
        ops = {"SUM": all_of_them.double().sum(0) if dtype in FLOATS else all_of_them.sum(0).to(dtype)}
        if dtype == torch.bool:
            ops = {"SUM": all_of_them.any(0)}
        if not dtype.is_complex:
            ops |= {"MAX": all_of_them.amax(0), "MIN": all_of_them.amin(0)}
        for op, expected in ops.items():
            tensor = sample(dtype, seed=comm.Get_rank())
            toolkit.all_reduce(tensor, op, group=comm)
            ulp = torch.finfo(dtype).eps if dtype in FLOATS else 0.0
            close = torch.allclose(tensor.to(expected.dtype), expected, rtol=2 * ulp, atol=20 * ulp)
            assert close or (dtype.is_complex and torch.allclose(tensor, expected))


def the_world_is_meant_where_no_group_is_given(comm: Any) -> None:
    """Rank, size, a sum, a barrier and a message without a group, as in programs of the original."""
    assert (toolkit.get_rank(), toolkit.get_world_size()) == (comm.Get_rank(), comm.Get_size())
    tensor = torch.ones(2)
    toolkit.all_reduce(tensor)
    assert tensor.tolist() == [comm.Get_size()] * 2
    toolkit.barrier()
    left, right = neighbours(comm)
    toolkit.send(torch.tensor([7.5]), right)
    assert toolkit.recv(left)[1].view(torch.float32).tolist() == [7.5]
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # under torchrun MPI sees one process
        assert toolkit._get_MPI().COMM_WORLD.Get_size() == comm.Get_size()


# ---------------------------------------------------------------------------------------------------------- means
class Pair(torch.nn.Module):
    """Two layers of which one may go without a gradient."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.full((3,), value))
        self.short = torch.nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16))
        self.now_and_then = torch.nn.Parameter(torch.tensor(value))
        self.never = torch.nn.Parameter(torch.ones(4))
        self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("seen", torch.tensor([value]))


def gradients_are_averaged_where_there_are_some(comm: Any) -> None:
    """D9: a rank without a gradient counts as zero; where nobody has one it stays None; counts are the group's."""
    for group in (comm, comm.Split(comm.Get_rank() // 2, 0)):
        members = [comm.Get_rank()] if group is None else group.allgather(comm.Get_rank())
        model = Pair(float(comm.Get_rank()))
        loss = comm.Get_rank() * (model.used.sum() + model.short.float().sum())
        if comm.Get_rank() % 2:
            loss = loss + model.now_and_then
        loss.backward()
        toolkit.average_gradients(model, group)
        mean = sum(members) / len(members)
        assert model.used.grad.tolist() == [mean] * 3
        assert model.short.grad.tolist() == [mean] * 2
        assert model.now_and_then.grad.item() == 0.5
        assert model.never.grad is None


def models_are_averaged_over_the_group(comm: Any) -> None:
    """B7: equal models over a part of the world stay what they are; parameters keep their memory."""
    part = comm.Split(comm.Get_rank() // 2, 0)
    model = Pair(0.7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    toolkit.average_models(model, part)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    other = Pair(float(comm.Get_rank()))
    toolkit.average_models(other, part)
    mean = comm.Get_rank() // 2 * 2 + 0.5
    assert {float(x) for name in ("used", "short", "frozen", "seen") for x in other.state_dict()[name]} == {
        mean
    }


def different_models_are_refused_everywhere(comm: Any) -> None:
    """Nobody is left waiting: each rank gets the error, which names the tensor."""
    model = torch.nn.Linear(2, 3 if comm.Get_rank() == 1 else 2)
    assert "weight" in refusal(lambda: toolkit.average_models(model, comm))


# ------------------------------------------------------------------------------------------------------ gathering
def rows_of_any_dtype_and_number_are_gathered(comm: Any) -> None:
    """D10: 300 rows of int8, one dimension, none at all, in a part of the world."""
    rank = comm.Get_rank()
    part = comm.Split(0 if rank < 3 else 1, 0)
    for dtype in DTYPES:
        own = sample(dtype, (300 * (rank % 3), 2), seed=rank)
        found = toolkit.gather_distributed_data(own, training_group=part)
        parts = [sample(dtype, (300 * (r % 3), 2), seed=r) for r in (range(3) if rank < 3 else [rank])]
        assert (found is None) == (part.Get_rank() > 0)
        assert found is None or torch.equal(found, torch.cat(parts))
    line = toolkit.gather_distributed_data(torch.full((rank,), rank), training_group=comm)
    assert line is None or line.tolist() == [r for r in range(comm.Get_size()) for _ in range(r)]
    listed = toolkit.gather_distributed_data([0.5] if rank == 3 else [], training_group=comm)
    assert listed is None or listed.tolist() == [0.5]


def rows_that_do_not_fit_are_refused_everywhere(comm: Any) -> None:
    """Each rank learns it."""
    rows = torch.ones(2, 2 + comm.Get_rank() % 2)
    told = refusal(lambda: toolkit.gather_distributed_data(rows, training_group=comm))
    assert "rank 1, 3 something else" in told


# ------------------------------------------------------------------------------------------------------- contexts
def a_job_is_divided_and_cleaned_up(comm: Any) -> None:
    """D12, D13: without torch.distributed; ranks outside a group have nothing to free; twice does no harm."""
    for make in (
        lambda: toolkit.initialize_distributed_compute_mpi4py(1, 1, 1, comm=comm, hosts=["one"] * 4),
        lambda: toolkit.initialize_distributed_compute(
            "mpi", 1, 1, use_coordinator=True, comm=comm, hosts=["one"] * 4
        ),
        lambda: toolkit.initialize_distributed_compute("gloo", 1, 1, True, comm=comm, hosts=["one"] * 4),
    ):
        place = make()
        rank = place.my_rank
        assert rank == comm.Get_rank()
        assert place.role == ("training", "training", "buffer", "coordinator")[rank]
        assert (place.train_global_group is not None) == (rank < 2) == place.is_training_rank()
        assert (place.buffer_group is not None) == (rank == 2) == place.is_buffer_rank()
        assert place.is_coordinator_rank() == (rank == 3)
        assert place.assigned_buffer == (2 if rank < 2 else None)
        assert place.assigned_training_ranks == ([0, 1] if rank == 2 else None)
        if rank < 2:
            tensor = torch.ones(1)
            toolkit.all_reduce(tensor, group=place.train_global_group)
            assert (
                tensor.item() == toolkit.get_world_size(group=place.agent_groups[place.agent_group_id]) == 2
            )
        place.cleanup()
        place.cleanup()
        assert place.train_global_group is None
        comm.Barrier()


def hosts_are_asked_where_none_are_given(comm: Any) -> None:
    """Two agent groups without buffers."""
    place = toolkit.initialize_distributed_compute("mpi", 0, 2, comm=comm)
    assert place.agent_group_size == 2
    assert [group is not None for group in place.agent_groups].count(True) == 1
    assert place.get_train_group().Get_size() == 4
    if comm.capabilities().backend == "mpi":
        with pytest.raises(UnsupportedError, match="'gloo'"):
            place.get_train_group("torch")
    else:
        assert toolkit.get_world_size("torch", place.get_train_group("torch")) == 4
    place.cleanup()


def torch_takes_its_groups_and_so_do_we(comm: Any) -> None:
    """F9: on real ranks they are torch's own, which is entered if need be; what was made is ended, twice the same."""
    if comm.capabilities().backend == "virtual":
        return
    import torch.distributed as dist

    before = dist.is_initialized()
    for _ in range(2):
        place = toolkit.initialize_distributed_compute("gloo", 1, 1, use_coordinator=True)
        groups = place.agent_groups, place.train_global_group, place.buffer_group
        rank = place.my_rank
        for group in [each for each in (*groups[0], *groups[1:]) if each is not None]:
            assert isinstance(group, dist.ProcessGroup)
            theirs, ours = torch.full((40_000,), float(rank)), torch.full((40_000,), float(rank))
            dist.all_reduce(theirs, group=group)
            toolkit.all_reduce(ours, group=group)
            assert torch.equal(theirs, ours)
            assert theirs[0].item() == sum(dist.get_process_group_ranks(group))
            assert toolkit.get_rank("torch", group) == dist.get_rank(group)
        if rank < 2:
            assert place.get_train_group("torch") is place.train_global_group
            assert place.get_train_group().allgather(rank) == [0, 1]
            model = Pair(float(rank))
            toolkit.average_models(model, place.train_global_group)
            assert model.used[0].item() == 0.5
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        toolkit.barrier("torch")
        assert everyone.item() == 4
        place.cleanup()
        place.cleanup()
        assert dist.is_initialized() == before


CHECKS: tuple[Check, ...] = (
    bytes_travel_unchanged,
    both_backends_send_the_same_bytes,
    a_ring_of_isends_does_not_deadlock,
    completion_shows_without_waiting,
    what_was_given_may_change_at_once,
    several_receivers_on_one_rank_get_whole_messages,
    groups_have_their_own_ranks,
    broadcast_counts_in_the_group,
    collectives_take_every_dtype,
    reductions_take_every_dtype,
    the_world_is_meant_where_no_group_is_given,
    gradients_are_averaged_where_there_are_some,
    models_are_averaged_over_the_group,
    different_models_are_refused_everywhere,
    rows_of_any_dtype_and_number_are_gathered,
    rows_that_do_not_fit_are_refused_everywhere,
    a_job_is_divided_and_cleaned_up,
    hosts_are_asked_where_none_are_given,
    torch_takes_its_groups_and_so_do_we,
)


def main(comm: Any) -> None:
    for check in CHECKS:
        comm.Barrier()
        check(comm)
        comm.record.event("checked", check=check.__name__)
