"""torchrun without its report of a failure: the rank that fails has reported it, and its status becomes the job's.

`python -m spawnsim.real.launch.torchrun ARGUMENTS…` takes torchrun's arguments.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run a job and return its status: that of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(list(arguments))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode > 0:
            return first.exitcode
        who = f"process rank {rank} with PID {first.pid} on node {socket.gethostname()}"
        sys.stderr.write(f"torchrun noticed that {who} exited on signal {-first.exitcode}\n")
        return 128 - first.exitcode
    except SignalException as signalled:
        return 128 + int(signalled.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
