"""Shared memory that a job leaves behind: MPI libraries name it in a folder of the system, and unname it at their end.

Ranks that were killed, that aborted, or that outlive others do not come to that end. Knows files and processes alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
NAMES = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "osc_rdma.*")  # of MPICH and of Open MPI
CLOCK_S = 1.0  # the times of files may be as coarse as that
MAPPING_S = 0.02  # from the making of such a file until its maker has it mapped


@contextmanager
def swept() -> Iterator[None]:
    """Remove what came while the block ran, is this user's, and is in use by no process: so it is no other job's."""
    began_s = time.time() - CLOCK_S
    try:
        yield
    finally:
        if left := [file for name in NAMES for file in FOLDER.glob(name) if _is_ours(file, began_s)]:
            time.sleep(MAPPING_S)
            used = _mapped()
            for file in left:
                if str(file) not in used:
                    file.unlink(missing_ok=True)


def _is_ours(file: Path, since_s: float) -> bool:
    try:
        found = file.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and found.st_ctime >= since_s


def _mapped() -> set[str]:
    """Return the shared memory that some process has mapped."""
    found = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended, or is another user's
            lines = maps.read_text(errors="replace").splitlines()
            found.update(line.partition(f" {FOLDER}/")[2] for line in lines if f"{FOLDER}/" in line)
    return {f"{FOLDER}/{name}" for name in found}
