"""The floor stands: names are there, and nothing heavy is loaded."""

import subprocess
import sys

import numpy as np

from spawnsim import comm


def test_comm_loads_no_foreign_library():
    """Importing the vocabulary loads neither torch, MPI, simpy nor greenlet."""
    code = "import sys, spawnsim.comm; sys.exit(bool({'torch', 'mpi4py', 'simpy', 'greenlet'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_message_goes_from_buffer_to_buffer():
    """What one buffer packs, another unpacks."""
    source, target = np.arange(4.0), np.zeros(4)
    comm.as_buffer(target).unpack(comm.as_buffer([source, comm.DOUBLE]).pack())
    assert target.tolist() == [0, 1, 2, 3]


def test_namespace_is_complete():
    """The namespace holds every constant, datatype and operation of the vocabulary under mpi4py's names."""
    names = comm.namespace()
    assert {"ERR_TRUNCATE", "DOUBLE", "SUM", "Exception", "IN_PLACE", "BottomType", "Status"} <= set(names)
