"""torchrun, without its own report: the rank that fails has said what there is to say, and its status is the job's.

`python -m spawnsim.real.torchrun ARGUMENTS…` takes torchrun's arguments. Knows torch's launcher.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run a job and return its status: that of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(list(arguments))
    except ChildFailedError as failed:
        status = failed.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
