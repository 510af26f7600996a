"""Communicators that only their own members make: `Create_group`, `Create_from_group`."""

from __future__ import annotations

from typing import Any

from spawnsim.comm.group import Group
from spawnsim.virtual.comm.communicators import COMM_NULL, Intracomm


def create_group(comm: Any, group: Group, tag: int | str) -> Any:
    """Return a communicator of a group's members, of whom each calls.

    The first member to call opens a context for the meeting; the meeting itself then takes place on it.
    """
    comm._check_group(group)
    if comm._rank.id not in group.members:
        return COMM_NULL
    calls = comm._context.notes.setdefault(("Create_group", group.members, tag), {})
    turn = calls[comm._rank.id] = calls.get(comm._rank.id, -1) + 1
    key = ("Create_group", group.members, tag, turn)
    context = comm._context.notes.get(key)
    if context is None:
        context = comm._context.notes[key] = comm._context.derive(group.members)
    new = Intracomm.enter(context, comm._rank.id)
    new._own, new._errhandler = comm._own, comm._errhandler
    new.barrier()
    return new


def create_from_group(group: Group, name: str, errhandler: Any) -> Any:
    """Return a communicator of a group's members, of whom each calls with the same name; the parent is COMM_WORLD."""
    from spawnsim.virtual.comm.calling import held

    new = create_group(held("COMM_WORLD"), group, name)
    if errhandler is not None and new:
        new.Set_errhandler(errhandler)
    return new
