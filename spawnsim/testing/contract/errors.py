"""Mistakes: each is told at once, to the rank that made it."""

from __future__ import annotations

from typing import Any

import numpy as np

from spawnsim.testing.claims import Skipped, claim, fails, refused, same


def ranks_that_do_not_exist(MPI: Any, comm: Any) -> None:
    """A peer outside the communicator is ERR_RANK, in every call that names one."""
    size, buf = comm.Get_size(), np.zeros(1)
    for call in (comm.Send, comm.Isend, comm.Ssend, comm.Irecv, comm.Recv):
        for peer in (size, -77):
            with fails(MPI, MPI.ERR_RANK):
                call(buf, peer)
    with fails(MPI, MPI.ERR_RANK):
        comm.send(1, dest=size)
    with fails(MPI, MPI.ERR_RANK):
        comm.recv(source=size)
    with fails(MPI, MPI.ERR_RANK):
        comm.Iprobe(size)


def tags_that_do_not_exist(MPI: Any, comm: Any) -> None:
    """Negative tags are ERR_TAG in sends."""
    rank = comm.Get_rank()
    with fails(MPI, MPI.ERR_TAG):
        comm.Isend(np.zeros(1), dest=rank, tag=-5)
    with fails(MPI, MPI.ERR_TAG):
        comm.isend(1, dest=rank, tag=MPI.ANY_TAG)


def roots_that_do_not_exist(MPI: Any, comm: Any) -> None:
    """A root outside the communicator is ERR_ROOT."""
    size = comm.Get_size()
    for call in (comm.Bcast, comm.Ibcast):
        for root in (size, -77):
            with fails(MPI, MPI.ERR_ROOT):
                call(np.zeros(1), root=root)


def null_communicators(MPI: Any, comm: Any) -> None:
    """COMM_NULL is of no use: ERR_COMM."""
    for name in ("Get_rank", "Get_size", "Barrier", "Free"):
        with fails(MPI, MPI.ERR_COMM):
            getattr(MPI.COMM_NULL, name)()


def a_communicator_works_on_after_errors(MPI: Any, comm: Any) -> None:
    """An error leaves the communicator as it was."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with fails(MPI, MPI.ERR_RANK):
        comm.Send(np.zeros(1), dest=size)
    same(comm.allreduce(1), size)
    same(comm.sendrecv("still here", dest=rank, source=rank), "still here")


def exceptions_are_codes(MPI: Any, comm: Any) -> None:
    """MPI.Exception compares with codes, knows its class and text, and is a RuntimeError."""
    try:
        comm.Send(np.zeros(1), dest=comm.Get_size())
    except MPI.Exception as error:
        claim(isinstance(error, RuntimeError), "MPI.Exception is a RuntimeError")
        same(error.Get_error_class(), MPI.ERR_RANK)
        claim(str(error) and error.Get_error_string() and error.error_string, "it has a text")
        claim(bool(error) and int(error) == error.Get_error_code() == error.error_code, "it is its code")
    made = MPI.Exception(MPI.ERR_TAG)
    claim(made == MPI.ERR_TAG and made != MPI.ERR_RANK and made > MPI.SUCCESS, "it compares as a number")
    same((hash(made), made.Get_error_class()), (hash(MPI.ERR_TAG), MPI.ERR_TAG))


def texts_of_errors(MPI: Any, comm: Any) -> None:
    """Every error class has a text, and is its own class."""
    for name in (
        "SUCCESS",
        "ERR_BUFFER",
        "ERR_COUNT",
        "ERR_TYPE",
        "ERR_TAG",
        "ERR_COMM",
        "ERR_RANK",
        "ERR_ROOT",
        "ERR_OP",
    ):
        code = getattr(MPI, name)
        claim(MPI.Get_error_string(code), f"{name} has a text")
        same(MPI.Get_error_class(code), code)


def errors_of_the_program(MPI: Any, comm: Any) -> None:
    """Programs add error classes, codes and texts."""
    error_class = MPI.Add_error_class()
    code = MPI.Add_error_code(error_class)
    MPI.Add_error_string(code, "out of coffee")
    same((MPI.Get_error_class(code), MPI.Get_error_string(code)), (error_class, "out of coffee"))
    same(MPI.Exception(code).Get_error_class(), error_class)


def errors_return_by_default(MPI: Any, comm: Any) -> None:
    """Errors are exceptions in Python; the handler of a duplicate is its parent's."""
    twin = comm.Dup()
    with fails(MPI, MPI.ERR_RANK):
        twin.Send(np.zeros(1), dest=comm.Get_size())
    handler = twin.Get_errhandler()
    same(handler == MPI.ERRORS_RETURN, True)
    handler.Free()
    twin.Free()


def missing_arguments(MPI: Any, comm: Any) -> None:
    """Python's own errors are raised for calls that cannot be."""
    with refused(TypeError):
        comm.Send(np.zeros(1))
    with refused(TypeError):
        comm.send()
    with refused(TypeError):
        comm.Bcast(np.zeros(1), root="zero")
    with refused(AttributeError):
        comm.no_such_call()


def counts_are_checked(MPI: Any, comm: Any) -> None:
    """Counts must be whole numbers of at least zero."""
    rank = comm.Get_rank()
    with refused(ValueError):
        comm.Isend([np.zeros(2), -1, MPI.DOUBLE], dest=rank)
    with refused(TypeError):
        comm.Isend([np.zeros(2), 1.5, MPI.DOUBLE], dest=rank)
    with refused(ValueError):
        comm.Isend([None, 1, MPI.DOUBLE], dest=rank)


def keyvals_are_checked(MPI: Any, comm: Any) -> None:
    """A keyval that nobody made is refused."""
    with refused(MPI.Exception):
        comm.Set_attr(MPI.KEYVAL_INVALID, 1)


def null_requests_and_operations(MPI: Any, comm: Any) -> None:
    """Cancelling or freeing a null request, freeing a null operation, are errors."""
    with fails(MPI, MPI.ERR_REQUEST):
        MPI.REQUEST_NULL.Cancel()
    with fails(MPI, MPI.ERR_REQUEST):
        MPI.Request().Free()
    with fails(MPI, MPI.ERR_OP):
        MPI.Op(MPI.OP_NULL).Free()
    with fails(MPI, MPI.ERR_OP):
        MPI.Op(MPI.SUM).Free()


def predefined_communicators_stay(MPI: Any, comm: Any) -> None:
    """COMM_WORLD cannot be freed."""
    with fails(MPI, MPI.ERR_COMM):
        MPI.COMM_WORLD.Free()
    same(MPI.COMM_WORLD.Get_size(), comm.Get_size())


def errors_of_the_program_can_be_removed(MPI: Any, comm: Any) -> None:
    """What was added can be taken away, where the library is recent enough."""
    error_class = MPI.Add_error_class()
    code = MPI.Add_error_code(error_class)
    MPI.Add_error_string(code, "out of coffee")
    try:
        MPI.Remove_error_string(code)
        MPI.Remove_error_code(code)
        MPI.Remove_error_class(error_class)
    except NotImplementedError:
        raise Skipped("this MPI removes no errors") from None
