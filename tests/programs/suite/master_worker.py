"""A master that hands out work to whoever asks, with tags and Status."""

from mpi4py import MPI

READY, START, DONE, EXIT = range(4)
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
status = MPI.Status()

if rank == 0:
    tasks = list(range(3 * size + 5))
    results = {}
    if size == 1:
        results = {task: task**2 for task in tasks}
    closed, position = 0, 0
    while closed < size - 1:
        data = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        source, tag = status.Get_source(), status.Get_tag()
        if tag == READY:
            if position < len(tasks):
                comm.send(tasks[position], dest=source, tag=START)
                position += 1
            else:
                comm.send(None, dest=source, tag=EXIT)
        elif tag == DONE:
            results[data[0]] = data[1]
        elif tag == EXIT:
            closed += 1
    assert results == {task: task**2 for task in tasks}
    print("all tasks done:", sum(results.values()))
else:
    while True:
        comm.send(None, dest=0, tag=READY)
        task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == EXIT:
            break
        comm.send((task, task**2), dest=0, tag=DONE)
    comm.send(None, dest=0, tag=EXIT)
