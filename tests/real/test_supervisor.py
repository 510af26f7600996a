"""Lines of the launcher are filtered out, and what the ranks write is forwarded as it comes."""

from __future__ import annotations

import sys

import pytest

from spawnsim.real.launch.supervisor import JobEnd, LauncherOutput, supervise

MPICH = b"""
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 2449 RUNNING AT here
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
OPEN_MPI = b"""--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 2449 on node here exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
FORKED = b"launcher noticed that process rank 2 with PID 2449 on node here exited on signal 9\n"
ULFM = b"""NBC_Progress: an error 75 was found during schedule 0x5630b43edbb0 at row-offset 0 - aborting the schedule

--------------------------------------------------------------------------
WARNING: The selected 'osc' module 'sm' is not tested for post-failure
operation, yet you have requested support for fault tolerance.

In this framework, the following components are tested to operate under
failure scenarios: {}
--------------------------------------------------------------------------
"""
PROGRAM = b"""first line

=====
-----------------------------------------
Abort? no, PID 3 is my own text
  0%|   | rank 0\r 10%|   | rank 0\r
end without newline"""


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("banner", [MPICH, OPEN_MPI, FORKED])
def test_a_banner_is_taken_out_and_understood(banner: bytes, size: int) -> None:
    """However the text is cut on its way, the program's own text is left, and the process and signal are known."""
    text, found = b"before\n" + banner + PROGRAM, LauncherOutput()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    shown = b"".join(map(found, chunks)) + found.rest()
    assert shown == b"before\n" + PROGRAM
    assert (found.process, found.node, found.signal) == (2449, "here", 9)
    assert found.rank in (-1, 2)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_open_mpi_says_of_a_death_that_is_survived_is_taken_out(size: int) -> None:
    """The ranks themselves say what matters; an empty line of the program's stays."""
    text, found = ULFM + b"mine\n\nmine\n" + ULFM, LauncherOutput()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert b"".join(map(found, chunks)) + found.rest() == b"mine\n\nmine\n"
    assert found.signal == 0
    assert (
        LauncherOutput()(b"3 more processes have sent help message help-mpi-ft.txt / module:untested\n")
        == b""
    )


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_mpich_says_of_a_death_that_is_not_cleaned_up_is_understood(size: int) -> None:
    """No rule comes before, and no process is named; it goes to standard output."""
    text, found = b"mine\n" + MPICH[MPICH.index(b"YOUR APPLICATION TERM") :] + PROGRAM, LauncherOutput()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert b"".join(map(found, chunks)) + found.rest() == b"mine\n" + PROGRAM
    assert (found.process, found.signal) == (-1, 9)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_line_of_ours_begins_with_nothing_else(size: int) -> None:
    """Open MPI's launcher puts a NUL before what is said of a death; its library's error about it is taken out."""
    lost = b"[here:12] PMIX ERROR: PMIX_ERR_UNREACH in file /a/b.c at line 121\n" if size > 1000 else b""
    text, found = lost + b"\0spawnsim: rank 0 was killed\n" + lost, LauncherOutput()
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert b"".join(map(found, chunks)) + found.rest() == b"spawnsim: rank 0 was killed\n"


def test_a_bar_is_shown_at_once() -> None:
    """Text without a line's end is not held back, unless it may be the launcher's own."""
    assert LauncherOutput()(b"\r 50%|##  |") == b"\r 50%|##  |"
    assert LauncherOutput()(b"Abor") == b""


@pytest.mark.parametrize("text", [b"\0", b"said\n\0", b"said\n\0" + OPEN_MPI + b"\0"])
def test_a_launchers_nul_is_taken_out(text: bytes) -> None:
    """Open MPI's writes one behind the last line of a job that was aborted; a program's own stay."""
    for size in (1, 100_000):
        found = LauncherOutput()
        shown = b"".join(found(text[start : start + size]) for start in range(0, len(text), size))
        assert shown + found.rest() == text[: text.index(b"\0")]
    mine = LauncherOutput()
    assert mine(b"a\0b\0") + mine.rest() == b"a\0b\0"
    assert mine(b"\0mine\n") + mine.rest() == b"\0mine\n"


def test_a_keeper_on_another_node_is_believed(capfd: pytest.CaptureFixture[str]) -> None:
    """It cannot reach the registry, so it says which rank died; the first one counts, not what the launcher says."""
    said = [
        "139 rank 1 (process 5 on far) was killed by signal 11 (SIGSEGV)",
        "7 rank 2 (process 6 on far) left with status 7",
    ]
    lines = "".join(f"[spawnsim monitor] {each}\n" for each in said) + MPICH.decode()
    program = f"import sys; sys.stderr.write({lines!r}); sys.exit(1)"
    assert supervise([sys.executable, "-c", program]) == JobEnd(139, said[0].removeprefix("139 "))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("said", "status", "mismatch"),
    [
        (
            "Recv(74): Message from rank 3 and tag 14 truncated; 16 bytes received but buffer size is 24",
            15,
            True,
        ),
        (
            "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes: gloo::EnforceNotMet",
            6,
            True,
        ),
        ("mpi4py.MPI.Exception: MPI_ERR_TRUNCATE: message truncated", 1, True),
        ("(unknown)(): Message truncated", 0, False),
        ("the log file was truncated", 15, False),
    ],
)
def test_calls_that_do_not_fit_are_noticed(said: str, status: int, mismatch: bool) -> None:
    """By what MPI and gloo write of them, in a job that ends badly."""
    program = f"import sys; print({said!r}, file=sys.stderr); sys.exit({status})"
    assert supervise([sys.executable, "-c", program]).mismatch == mismatch
