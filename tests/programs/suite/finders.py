"""A finder at the head of `sys.meta_path`, where pytest puts its own, loads what each rank has for itself."""

import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location

from mpi4py import MPI

comm = MPI.COMM_WORLD
loaded = []


class Loader(SourceFileLoader):
    def exec_module(self, module):
        loaded.append(module.__name__)
        super().exec_module(module)


class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if not name.startswith("helper_"):
            return None
        return spec_from_file_location(name, spec.origin, loader=Loader(name, spec.origin))


mine = Finder()
sys.meta_path.insert(0, mine)
assert sys.meta_path.index(mine) == 0
comm.Barrier()
import helper_state  # noqa: E402

comm.Barrier()
sys.meta_path.remove(mine)
assert mine not in sys.meta_path
comm.Barrier()
assert comm.rank == helper_state.RANK
assert sum(comm.allgather(len(loaded))) == comm.size
if comm.rank == 0:
    print("finders", helper_state.__name__)
