"""A sweep in Python: how the time of an average grows with the ranks, with and without stragglers."""

import tempfile

from spawnsim.study import Sweep, grid

PROGRAM = """
import numpy as np

def main(comm):
    total = np.empty(1000)
    for _ in range(10):
        with comm.compute(0.01):
            pass
        comm.Allreduce(np.ones(1000), total)
"""

with tempfile.TemporaryDirectory() as folder:
    file = f"{folder}/program.py"
    with open(file, "w") as out:
        out.write(PROGRAM)
    cells = grid(file, ranks=[4, 16, 64], seeds=[0], around={"stragglers": [None, "lognormal:0.3"]})
    table = Sweep.run(cells, f"{folder}/sweep", jobs=0).table()
    rows = zip(table["ranks"], table["stragglers"], table["virtual_seconds"], strict=True)
    for ranks, stragglers, seconds in sorted(rows, key=lambda row: (int(row[0]), row[1])):
        print(f"{ranks:3} ranks, stragglers {stragglers}: {seconds:.3f} s")
