"""`Comm` on a real MPI: what the wrapper adds to mpi4py."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


def test_numbers_of_torch_are_ranks_tags_and_roots(ranks):
    """Whoever computes a rank has it as a tensor."""
    ranks(
        """
        import torch
        right, left = torch.tensor((rank + 1) % size), torch.tensor((rank - 1) % size)
        tag, total = torch.tensor(3), np.zeros(1)
        request = comm.Irecv(total, left, tag)
        comm.Send(np.full(1, float(rank)), right, tag)
        request.Wait()
        assert total[0] == left
        assert comm.bcast(rank, root=torch.tensor(2)) == 2
        assert comm.Split(torch.tensor(rank % 2), torch.tensor(-rank)).allgather(rank) == [rank % 2 + 2, rank % 2]
        """
    )


def test_object_receives_take_messages_of_any_size_in_posting_order(ranks):
    """`irecv` has no limit of 32 KiB, completes while its rank is in a Barrier, and comes before later receives."""
    ranks(
        """
        before, after = (rank - 1) % size, (rank + 1) % size
        first = comm.irecv(source=before, tag=9)
        comm.ssend(b"x" * 3_000_000, after, tag=9)
        comm.send("second", after, tag=9)
        comm.send("third", after, tag=8)
        comm.Barrier()
        assert comm.recv(source=before, tag=9) == "second"
        assert comm.recv() == "third"
        assert len(first.wait()) == 3_000_000
        """
    )


def test_dropped_requests_lose_nothing(ranks):
    """A bare MPI corrupts 8 of 8 messages of 80 kB when the request of an Isend is dropped."""
    ranks(
        """
        for number in range(40):
            comm.Isend(np.full(10_000, float(number)), (rank + 1) % size, tag=1)
        junk = [np.random.rand(10_000) for _ in range(50)]
        buffer = np.empty(10_000)
        for number in range(40):
            comm.Recv(buffer, tag=1)
            assert (buffer == number).all(), number
        comm.Barrier()
        for _ in range(40):
            comm.poll()
        assert len(comm.runtime.registry) == 0
        """
    )


def test_a_blocking_receive_times_out_and_can_be_caught(ranks):
    """A receive that nobody answers ends in Timeout with the peer's rank, and the rank goes on."""
    ranks(
        """
        buffer = np.empty(1)
        begin = comm.clock.now()
        for call in (lambda: comm.Recv(buffer, source=1, tag=77), lambda: comm.recv(source=1, tag=78),
                     lambda: comm.irecv(source=1, tag=79).wait(), lambda: comm.Irecv(buffer, 1, 80).Wait()):
            try:
                with comm.clock.deadline(0.2):
                    call()
            except Timeout as error:
                assert error.ranks == (1,), error
                assert "rank" in str(error) and "0.2 s" in str(error)
            else:
                raise AssertionError("no timeout")
        assert comm.clock.now() - begin < 8  # none of them took the job's own ten seconds
        """
    )


@pytest.mark.parametrize("size", [3, 4])
def test_ordered_reduction_sums_in_rank_order(ranks, size):
    """`reduction="ordered"` is the same bits as a loop over the ranks, also with IN_PLACE and few elements."""
    ranks(
        """
        for length in (1, 2, 5, 1000, 100_001):
            numbers = [np.random.default_rng(r).normal(size=length) for r in range(size)]
            wanted = numbers[0].copy()
            for other in numbers[1:]:
                wanted = wanted + other
            total = np.empty(length)
            comm.Allreduce(numbers[rank].copy(), total)
            assert total.tobytes() == wanted.tobytes()
            total[:] = numbers[rank]
            comm.Allreduce(IN_PLACE, total)
            assert total.tobytes() == wanted.tobytes()
        """,
        n=size,
        options="Options(reduction='ordered')",
    )


def test_records_go_to_the_recorder_with_rank_and_time(ranks):
    """Rows and events carry the world's rank, also when recorded through a sub-communicator."""
    ranks(
        """
        class Recorder:
            rows, events = [], []
            def row(self, rank, time_s, values): self.rows.append((rank, time_s, dict(values)))
            def event(self, rank, time_s, kind, fields): self.events.append((rank, kind, dict(fields)))
        comm = world(recorder=Recorder())
        with guarded(comm):
            half = comm.Split(comm.rank % 2)
            assert half.rng is comm.rng and comm.Split(UNDEFINED) is None
            with half.compute(0.01):
                time.sleep(0.01)
            half.record(loss=1.5)
            comm.record.event("replaced", donor=3)
            rank, time_s, values = Recorder.rows[0]
            assert (rank, values) == (comm.rank, {"loss": 1.5}) and 0.01 <= time_s < 5
            assert Recorder.events.pop() == (comm.rank, "replaced", {"donor": 3})
            from contextlib import suppress
            for error in (None, ValueError("late")):
                with suppress(ValueError), comm.record.operation("box", "put", 7) as call:
                    call.result = 8
                    if error:
                        raise error
            (_, kind, ended), (_, _, pending) = Recorder.events
            assert kind == "operation" and ended["end_s"] >= ended["begin_s"]
            assert (ended["object"], ended["method"], ended["arguments"], ended["result"]) == ("box", "put", (7,), 8)
            assert (pending["result"], pending["end_s"]) == (None, None)
        """
    )


def test_persistent_calls_count_at_each_start(ranks):
    """With the bytes that they send; receives as receives."""
    ranks(
        """
        a, b, counters = np.ones(10), np.empty(10), comm.runtime.counters
        calls = [comm.Recv_init(b, (rank - 1) % size), comm.Send_init(a, (rank + 1) % size)]
        sums = comm.Allreduce_init(np.ones(4), np.empty(4))
        before = counters.messages, counters.nbytes, counters.received
        for call in [*calls, *calls, sums]:
            call.Start()
            if call is not calls[0]:
                (call if call is sums else calls[0]).Wait()
                call.Wait()
        after = counters.messages, counters.nbytes, counters.received
        assert [now - then for now, then in zip(after, before)] == [3, 2 * 80 + 32, 2]
        """
    )


def test_buffers_are_kept_as_long_as_the_library_reads_and_writes_them(ranks):
    """mpi4py lets go of those of non-blocking reductions, and of accesses to windows before they are flushed."""
    ranks(
        """
        import weakref
        from spawnsim.comm import DOUBLE
        after = (rank + 1) % size

        class Array(np.ndarray):
            alive = set()

        def made(count=4):
            array = np.ones(count).view(Array)
            Array.alive.add(id(array))
            weakref.finalize(array, Array.alive.discard, id(array))
            return array

        calls = {
            "Iallreduce": lambda: comm.Iallreduce(made(), made()),
            "counted": lambda: comm.Iallreduce([made(), 4], recvbuf=[made(), DOUBLE]),
            "Ireduce": lambda: comm.Ireduce(made(), made()),
            "Iscan": lambda: comm.Iscan(made(), made()),
            "Iexscan": lambda: comm.Iexscan(made(), made()),
            "Ireduce_scatter_block": lambda: comm.Ireduce_scatter_block(made(4 * size), made()),
            "Ireduce_scatter": lambda: comm.Ireduce_scatter(made(4 * size), made(), [4] * size),
            "Iallgatherv": lambda: comm.Iallgatherv(made(), [made(4 * size), [4] * size]),
            "Ialltoall": lambda: comm.Ialltoall(made(4 * size), made(4 * size)),
        }
        for name, call in calls.items():
            request = call()
            assert len(Array.alive) == 2, (name, len(Array.alive))
            request.Wait()
            assert not Array.alive, name
        started = comm.Allreduce_init(made(), made())
        for _ in range(2):
            started.Start()
            assert len(Array.alive) == 2
            started.Wait()
        started.Free()
        del started
        Array.alive.clear()
        win = comm.Win.Allocate(8 * 4, 8)
        win.Lock_all()
        for call in (win.Put, win.Get, win.Accumulate):
            call(made(), after)
            call(made(), rank)
            win.Flush(rank)
            assert len(Array.alive) == 1
            win.Flush_all()
            assert not Array.alive
        same = made()
        win.Get_accumulate(same, made(), after)
        win.Get_accumulate(same, made(), after)
        assert len(Array.alive) == 3
        win.Unlock_all()
        del same
        assert not Array.alive
        win.Free()
        """
    )


@pytest.mark.parametrize(
    "options",
    ["Options()", "Options(check_calls=True)", "Options(reduction='ordered')", "Options(survive=True)"],
)
def test_bfloat16_is_summed_as_on_virtual_ranks(ranks, options):
    """Bit for bit: in float32, rounded at each step, in the order of recursive doubling (or of ranks).

    Open MPI takes an order of its own for such an op.
    """
    ranks(
        """
        import torch
        from mpi4py import MPI
        from spawnsim.comm import BF16, BFLOAT16_T
        from spawnsim.comm.ops import MIN, PROD, SUM, reduce_tree
        for count in (5, 5000, 100_000):
            mine = torch.randn(count, generator=torch.Generator().manual_seed(rank)).bfloat16()
            parts = comm.allgather(mine.view(torch.int16).numpy())
            for op in (SUM, PROD, MIN):
                found = mine.clone()
                comm.Allreduce(IN_PLACE, found, op)
                merge, arrays = op.merging(BFLOAT16_T), [part.view(BF16) for part in parts]
                wanted = arrays[0]
                for other in arrays[1:]:
                    wanted = merge(wanted, other, np.empty_like(other))
                if not comm.runtime.ordered:
                    wanted = reduce_tree(arrays, merge)
                if comm.runtime.ordered or MPI.get_vendor()[0] != "Open MPI":
                    assert (found.view(torch.int16).numpy().view(BF16) == wanted).all(), (count, op.name)
                numbers = torch.from_numpy(wanted.view(np.int16)).view(torch.bfloat16)
                assert torch.allclose(found.float(), numbers.float(), rtol=0.1, atol=0.1)
        """,
        options=options,
    )


def test_bfloat16_is_distinguished_from_other_types(ranks):
    """It has a type of its own, also in a program's op and in what a receive counts; objects are left alone."""
    ranks(
        """
        import torch
        from mpi4py import MPI
        from spawnsim.comm import BF16, BFLOAT16_T, Op, Status
        ones, status, told = torch.ones(4, dtype=torch.bfloat16), Status(), []
        def latest(inbuf, inoutbuf, datatype):
            told.append(datatype)
        comm.Allreduce(ones, torch.empty_like(ones), Op.Create(latest, commute=True))
        assert set(told) <= {BFLOAT16_T}, told
        outgoing = comm.Isend([ones, 3], (rank + 1) % size)
        comm.Recv(torch.empty_like(ones), (rank - 1) % size, status=status)
        outgoing.Wait()
        assert status.Get_count(BFLOAT16_T) == 3
        MPI.Attach_buffer(bytearray(10_000))
        comm.bsend(ones, (rank + 1) % size)
        assert type(comm.recv(source=(rank - 1) % size)) is torch.Tensor
        MPI.Detach_buffer()
        try:
            comm.Allreduce(ones, np.empty(4, np.uint16))
        except ValueError as error:
            assert "mismatch" in str(error)
        else:
            raise AssertionError("accepted")
        window = comm.Win.Create(ones, disp_unit=2, comm=comm)
        window.Fence()
        window.Put(ones[:1] * (rank + 2), (rank + 1) % size, 3)
        window.Fence()
        assert ones[3] == (rank - 1) % size + 2
        window.Free()
        """
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_windows_refuse_to_compute_on_what_mpi_would_compute_wrongly(ranks, dtype):
    """Sums of 16-bit floats end in one error on the rank that asks; they may be replaced. Sums of float32 go on."""
    ranks(
        f"""
        import torch
        from spawnsim.comm import DOUBLE
        after = (rank + 1) % size
        from spawnsim.comm.ops import MAX, NO_OP, REPLACE, SUM
        kind = torch.{dtype}
        one, target = torch.ones(1).to(kind), (rank + 1) % size
        result, numbers = torch.empty_like(one), torch.zeros(4)
        window = comm.Win.Create(torch.zeros(4).to(kind), disp_unit=one.element_size(), comm=comm)
        sums = comm.Win.Create(numbers, disp_unit=4, comm=comm)
        window.Lock(target); sums.Fence()
        calls = [
            lambda op: window.Accumulate(one, target, op=op), lambda op: window.Raccumulate(one, target, op=op),
            lambda op: window.Get_accumulate(one, result, target, op=op),
            lambda op: window.Rget_accumulate(one, result, target, op=op),
            lambda op: window.Fetch_and_op(one, result, target, op=op),
            lambda op: window.Accumulate([one, 1], target, [0, 1], op),
        ]
        for op in (SUM, MAX):
            for call in calls:
                try:
                    call(op)
                except UnsupportedError as error:
                    assert f"rank {{comm.rank}}: Win." in str(error) and "{dtype} with" in str(error), error
                else:
                    raise AssertionError("accepted")
        calls[0](REPLACE); calls[1](REPLACE).Wait(); calls[2](NO_OP); window.Unlock(target)
        sums.Raccumulate(torch.ones(2), target).Wait(); sums.Fence()
        assert result.float()[0] == 1 and numbers.tolist() == [1, 1, 0, 0]
        sums.Free(); window.Free()
        """
    )
