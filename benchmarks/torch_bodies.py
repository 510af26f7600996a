"""One body of PyTorch's own tests of torch.distributed, on virtual ranks or on gloo's.

    spawnsim run benchmarks/torch_bodies.py --ranks 3 -- test_all_reduce_sum
    torchrun --nproc-per-node 3 benchmarks/torch_bodies.py test_all_reduce_sum

Without a name, the bodies are listed. They need `pip install expecttest`. Two things differ from PyTorch's own run,
on virtual ranks as on gloo's: ranks wait for each other with a store instead of files named after their processes;
and collectives are called without PyTorch's profiler around each (`--profiled` restores it).
`test_barrier_timeout_global` fails under torchrun, and passes in three processes started without it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import unittest
from datetime import timedelta
from typing import Any

os.environ["BACKEND"] = "gloo"  # the suite reads it when it is imported

import torch.distributed as dist
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.distributed import distributed_test as suite

PROFILED = "--profiled" in sys.argv


class Bodies(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The bodies, as a rank calls them."""

    meetings = 0

    def _barrier(self, wait_for: int | None = None, timeout: float = 60) -> None:
        key = f"barrier {self.meetings}"
        self.meetings += 1
        if self.store.add(key, 1) == (wait_for or int(self.world_size)):
            self.store.set(f"{key} is over", "yes")
        self.store.wait([f"{key} is over"], timedelta(seconds=timeout))

    def call_dist_op(self, title: str, is_async: bool, op: Any, *args: Any, **options: Any) -> None:
        if PROFILED:
            return super().call_dist_op(title, is_async, op, *args, **options)
        second = options.pop("secondary_op_call", None)
        for what in ("expect_event", "profile_cuda", "tensor_shapes"):
            options.pop(what, None)
        works = [op(*args, **options), *([second()] if second is not None else [])]
        for work in works if is_async else ():
            work.wait()
        return None

    def run_body(self, name: str) -> None:
        """Run a body between two barriers, as its own suite does."""
        limit = timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout))
        dist.init_process_group("gloo", timeout=limit)
        self.rank = dist.get_rank()
        self.store = dist.PrefixStore("bodies", dist.distributed_c10d._get_default_store())
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        os.environ["TEMP_DIR"], self.file_name = folder[0], os.path.join(folder[0], "init")
        os.makedirs(os.path.join(folder[0], "test_dir"), exist_ok=True)
        self._barrier()
        set_rng_seed()
        getattr(self, name)()
        self._barrier()


def listed() -> list[str]:
    """Return the names of the bodies that need neither CUDA nor NCCL."""
    return [name for name in dir(Bodies) if name.startswith("test_") and not re.search("cuda|nccl", name)]


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--profiled"]
    if not names:
        print(*listed(), sep="\n")
        sys.exit()
    try:
        Bodies(names[0]).run_body(names[0])
        said = "passed"
    except unittest.SkipTest as reason:
        said = f"skipped: {reason}"
    except SystemExit as end:  # the suite's decorators skip in this way
        said = next(
            f"skipped: {why.message}" for why in suite.TEST_SKIPS.values() if why.exit_code == end.code
        )
    print(f"{names[0]} {said}")
