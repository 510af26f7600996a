"""Rank 0 leads for a term that all others have granted; rank 1 takes over once it hears nothing of the leader."""

from spawnsim.errors import Timeout

TERM_S, EVERY_S = 0.1, 0.02


def main(comm, iterations=20, fixed=False):
    comm.check(
        "one leader",
        always=lambda row: sum(row.time_s < end_s for end_s in row.latest("leads_until_s").values()) <= 1,
    )
    if comm.rank == 0:
        lead(comm, iterations)
    else:
        follow(comm, fixed)


def lead(comm, terms):
    """Ask all others for one term after the other, until one of them does not answer in time."""
    others = range(1, comm.size)
    end_s = TERM_S
    for term in range(terms):
        asked_s = comm.clock.now()
        for other in others:
            comm.isend((term, asked_s + TERM_S), other)
        try:
            with comm.clock.deadline(max(end_s - asked_s, 1e-9)):
                for other in others:
                    comm.recv(source=other, tag=term)
        except Timeout:
            return  # its term has ended
        end_s = asked_s + TERM_S
        comm.record(leads_until_s=end_s)
        comm.clock.sleep(EVERY_S)
    for other in others:
        comm.isend(None, other)


def follow(comm, fixed):
    """Grant the leader's terms. The second rank succeeds it: after its last term, or, wrongly, after some silence."""
    granted_s = TERM_S
    while True:
        now_s = comm.clock.now()
        try:
            with comm.clock.deadline(max(granted_s - now_s, 1e-9) if fixed else TERM_S / 2):
                asked = comm.recv(source=0)
        except Timeout:
            break
        if asked is None:
            return
        term, end_s = asked
        if end_s > comm.clock.now():
            granted_s = max(granted_s, end_s)
            comm.isend(None, 0, tag=term)
    if comm.rank == 1:
        comm.record(leads_until_s=comm.clock.now() + TERM_S)
