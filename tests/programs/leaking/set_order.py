"""A rank goes through a set of names in whatever order it has."""


def main(comm, iterations=4):
    layers = {"embedding", "attention", "norm", "head", "bias", "gate"}
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        comm.bcast(" ".join(layers if iteration == 2 else sorted(layers)), root=1)
