"""Programs of four ranks, started for a test and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.crew import MEMBER, Crew, first
from support.surviving import survive

__all__ = ["survive"]  # fixtures that other files of tests share

HEAD = """
import os, sys, time
import numpy as np
from spawnsim.comm.constants import *
from spawnsim.errors import *
from spawnsim.real.mpi import Options, close, guarded, world
"""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    out: str
    err: str


Job = Callable[..., Outcome]


def mpiexec() -> str:
    """Return the launcher of the MPI that this interpreter loads."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def surroundings() -> dict[str, str]:
    """Return an environment in which either MPI starts as root, with more ranks than cores."""
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm", "OMPI_MCA_osc": "^ucx",
    }  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Run a program text on n ranks: `job(text, n=4)`; the job is killed when it takes longer than a minute."""

    def run(
        text: str, *, n: int = 4, head: str = HEAD, limit_s: float = 60.0, flags: tuple[str, ...] = ()
    ) -> Outcome:
        file = tmp_path / "program.py"
        file.write_text(head + textwrap.dedent(text))
        command = [mpiexec(), *flags, "-n", str(n), sys.executable, str(file)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes, env=surroundings(), start_new_session=True) as started:
            try:
                out, err = started.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                out, err = started.communicate()
                pytest.fail(f"the job hung\n{out}\n{err}")
        return Outcome(started.returncode, out, err)

    return run


Crews = Callable[..., Crew]


@pytest.fixture(scope="package")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    """Return ranks that stay until the folder's last test: `crews(n=2, backend="torch")`; `line` starts others."""
    found: dict[tuple[str, ...], Crew] = {}

    def get(*, n: int = 4, backend: str = "mpi", line: tuple[str, ...] = ()) -> Crew:
        start = tuple(line) or (mpiexec(), "-n", str(n), sys.executable)
        key = (backend, *start)
        if key not in found or found[key].failed:
            member, folder = MEMBER.format(backend=backend), tmp_path_factory.mktemp("crew")
            found[key] = Crew(start, member, n=n, folder=folder, env=surroundings())
        return found[key]

    yield get
    for crew in found.values():
        if not crew.failed:
            crew.dismiss()


@pytest.fixture
def ranks(crews: Crews, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a text as the body of `main(comm)`, with `rank` and `size`, on n of four ranks, and see that it goes well."""

    def run(text: str, *, n: int = 4, options: str = "Options()") -> None:
        chosen = f"OPTIONS, WORLD = {options}, {request.module.__name__!r}\n"
        crews().run(HEAD + chosen + first(n) + textwrap.indent(textwrap.dedent(text), "    "))

    return run
