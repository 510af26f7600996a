"""Rank 0 gives each worker two tasks at a time; if a worker dies, another one gets the task that it was working on."""

from collections import deque

from spawnsim.errors import RankFailed, Timeout

TASKS = 12


def main(comm, fixed=False):
    comm.check("all tasks done", eventually=lambda row: row["done"] == TASKS or 0 not in row.alive)
    if comm.rank == 0:
        farm(comm, fixed)
        return
    try:
        while (task := comm.recv(source=0)) is not None:
            with comm.compute(0.01):
                pass
            comm.send(task, dest=0)
    except RankFailed:
        pass  # rank 0 has died


def farm(comm, fixed):
    """Hand out the tasks, and record how many have been done."""
    tasks, done = deque(range(TASKS)), set()
    given = {rank: deque() for rank in range(1, comm.size)}
    while tasks or any(given.values()):
        for rank, own in given.items():
            while tasks and len(own) < 2:
                own.append(tasks.popleft())
                comm.isend(own[-1], rank)
        for rank in [*given]:
            try:
                while given[rank] and comm.iprobe(source=rank):
                    done.add(comm.recv(source=rank))
                    given[rank].popleft()
                    comm.record(done=len(done))
            except RankFailed:
                pass
            if rank in comm.absent():
                lost = given.pop(rank)
                tasks.extend(lost if fixed else list(lost)[:1])
        comm.clock.sleep(0.001)
    for rank in given:
        try:
            comm.isend(None, rank)
        except (RankFailed, Timeout):
            pass
