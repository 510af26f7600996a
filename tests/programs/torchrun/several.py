"""Several programs one after the other on torchrun's ranks, each in processes forked from ones that have loaded torch.

    torchrun --nproc-per-node 4 several.py FOLDER name:ranks,argument... name:ranks...

What a program's ranks print goes into FOLDER, a file for each rank. A program with fewer ranks than torchrun has
started runs on the first ones.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from torch import _dynamo  # every optimizer imports it: 1 s of each process
from torch.distributed import PrefixStore, checkpoint, fsdp, optim
from torch.distributed.tensor import parallel

rendezvous = sys.modules["torch.distributed.rendezvous"]  # whose name in the package is a function
LOADED = _dynamo, checkpoint, fsdp, optim, parallel  # what programs use, loaded once
HERE = Path(__file__).parent


def run(place, name, ranks, arguments):
    """Run a program in this process, and end it without what Python does at its end."""
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    made = rendezvous._create_c10d_store
    # What one program leaves in torchrun's store, the next one must not find.
    rendezvous._create_c10d_store = lambda *args, **kwargs: PrefixStore(str(place), made(*args, **kwargs))
    sys.argv = [str(HERE / f"{name}.py"), *arguments]
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - told, and the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # one of gloo's threads may hold a Python object: now and then it aborts an interpreter that ends


def main():
    """Run those that this rank is one of; end badly if one did."""
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    codes = []
    for place, told in enumerate(sys.argv[2:]):
        program, *arguments = told.split(",")
        name, ranks = program.split(":")
        if rank >= int(ranks):
            continue
        child = os.fork()
        if not child:
            with open(folder / f"{program}.{rank}", "w", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                run(place, name, ranks, arguments)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if codes[-1]:
            sys.exit(f"rank {rank} of {told} ended with {codes[-1]}")


if __name__ == "__main__":
    main()
