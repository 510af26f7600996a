"""Forty planted bugs, one for each promise: which of them does the test suite catch?

    python benchmarks/mutants.py            all
    python benchmarks/mutants.py 3 17       these

A mutant changes one line in a copy of the checkout, and runs the tests named next to it there, until the first
failure. The old line must be in exactly one file of spawnsim/, so that the list fails, and is updated, when code
moves.
"""

# ruff: noqa: E501
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 600


class Mutant(NamedTuple):
    """A promise, a line of code that keeps it, the line that breaks it, and the tests that should fail."""

    promise: str
    old: str
    new: str
    tests: str  # arguments of pytest


MUTANTS = (
    # -- time, messages
    Mutant("messages of one sender do not overtake", "if source in latest and envelope_s < latest[source]:",
           "if source in latest and envelope_s < -latest[source]:", "tests/models/faults tests/virtual/engine"),
    Mutant("of two receives the one posted first matches", "if first is None or receive.number < first.number:",
           "if first is None or receive.number > first.number:", "tests/virtual/engine tests/virtual/mpi"),
    Mutant("a message above the eager threshold asks first", "rendezvous = nbytes > world.network.eager_bytes and",
           "rendezvous = nbytes >= world.network.eager_bytes and", "tests/virtual/engine tests/models"),
    Mutant("a NIC sends one message at a time", "source.nic_free_s = begin_s + inject_s\n    message.envelope_s",
           "source.nic_free_s = begin_s\n    message.envelope_s", "tests/virtual/engine tests/models"),
    Mutant("the digest covers the data sent", "digest.contents = crc32(payload, digest.contents)",
           "digest.contents = digest.contents", "tests/virtual/test_digest.py"),
    Mutant("many to one share the receiver's NIC", "after_s = self.free_s.get(nic, -math.inf) + drain_s",
           "after_s = self.free_s.get(nic, -math.inf)", "tests/models/network"),
    # -- collectives
    Mutant("recursive doubling folds counts that are not powers of two", "extra = size - (1 << (size.bit_length() - 1))",
           "extra = max(size - (1 << (size.bit_length() - 1)) - 1, 0)", "tests/models/collectives"),
    Mutant("a ring allreduce takes 2(P-1) rounds", "_around(size, 1, reduces=True) + _around(size, 0), parts=size)",
           "_around(size, 1, reduces=True), parts=size)", "tests/models/collectives"),
    Mutant("MAXLOC: the lowest index wins a tie", 'lowest = np.minimum(first["index"], inout["index"])',
           'lowest = np.maximum(first["index"], inout["index"])', "tests/comm tests/virtual/mpi"),
    Mutant("logical operations give 0 or 1", '"LXOR": lambda x, y: bool(x) ^ bool(y),', '"LXOR": lambda x, y: x ^ y,',
           "tests/comm tests/virtual/mpi tests/contract"),
    # -- random numbers, stragglers, faults
    Mutant("stragglers keep the mean", "return stream.lognormal(-0.5 * self.sigma**2, self.sigma, count)",
           "return stream.lognormal(0.0, self.sigma, count)", "tests/models/compute"),
    Mutant("each rank draws from its own stream", "(ranks + 1).astype(np.uint32)", "(0 * ranks + 1).astype(np.uint32)",
           "tests/models/compute tests/columnar/test_columnar.py tests/virtual/test_generators.py"),
    Mutant("a flipped bit is in the damaged message", "raw[int(raw.size * place)] ^= 0x80",
           "raw[int(raw.size * place)] ^= 0x00", "tests/models/faults"),
    Mutant("a lost message is not delivered", "if not verdict.lost:\n            self._deliver(source, mailbox", "if True:\n            self._deliver(source, mailbox", "tests/models/faults"),
    Mutant("a rank that draws numpy's numbers leaves the others' alone",
           "self._numpy = np.random.RandomState(self._streams.seed(NUMPY) & 0xFFFFFFFF)",
           "self._numpy = np.random.RandomState(0)", "tests/virtual/test_generators.py"),
    # -- rules of policies
    Mutant("a metric that is not finite is the worst", "return np.where(np.isfinite(metrics), metrics if mode",
           "return np.where(~np.isnan(metrics), metrics if mode", "tests/policies/rules tests/columnar"),
    Mutant("ties go by rank", "chosen[np.flatnonzero(good == last)[: count", "chosen[np.flatnonzero(good == last)[::-1][: count",
           "tests/policies/rules"),
    Mutant("at least one rank is replaced, and one is left", "return min(max(1, math.floor(size * ratio + 1e-9)), size - 1)",
           "return min(math.floor(size * ratio + 1e-9), size - 1)", "tests/policies/rules tests/policies/test_selective.py"),
    Mutant("the best rank stays when all are behind", "chosen[len(good) - 1 - int(good[::-1].argmax())] = False",
           "chosen[int(good.argmin())] = False", "tests/policies/rules tests/policies/test_selective.py"),
    Mutant("the last of equal donors gives", "place = good.shape[-1] - 1 - good[..., ::-1].argmax(-1, keepdims=True)",
           "place = good.argmax(-1, keepdims=True)", "tests/policies/rules tests/columnar"),
    Mutant("EDiT weighs by exp(-norm)", "weights[finite] = np.exp(given[finite].min() - given[finite])",
           "weights[finite] = np.exp(given[finite] - given[finite].max())", "tests/policies"),
    Mutant("a cooldown keeps rounds apart", "if round_ - self.last_trigger < self.cooldown:",
           "if round_ - self.last_trigger < 0:", "tests/policies/test_selective.py tests/policies/exchange"),
    # -- state, exchange
    Mutant("a corrupted body is compressed or refused", "if isinstance(codec, NoCompression) or not np.isfinite(values).all():",
           "if isinstance(codec, NoCompression):", "tests/policies/state tests/policies/averaging"),
    Mutant("equal values come back exactly", "if scale == 0:", "if scale < 0:", "tests/policies/state tests/policies/averaging"),
    Mutant("a body that is too short is refused", "if values.size != count:", "if values.size > count:",
           "tests/policies/state tests/policies/averaging"),
    Mutant("numbers that are not finite do not reach outer optimizers", "row.nan_to_num_(0.0, 0.0, 0.0)",
           "row.nan_to_num_(1.0, 0.0, 0.0)", "tests/policies/state"),
    Mutant("a client reduces nothing", "rates = [0.0 if member.role is Role.CLIENT else member.bandwidth",
           "rates = [1.0 if member.role is Role.CLIENT else member.bandwidth", "tests/policies/averaging"),
    # -- training
    Mutant("a changed buffer is reported", "if not _close(a, b, tolerance, max(_size(b), SMALL)):\n            return f\"buffer",
           "if False:\n            return f\"buffer", "tests/training"),
    Mutant("a loss that draws random numbers is reported",
           'return DRAWS if drew or not torch.equal(self._now[2], drawn[2]) else ""', 'return ""', "tests/training"),
    # -- records, checkpoints, commands
    Mutant("a full disk leaves no torn frame", "file.truncate(whole)", "pass", "tests/record tests/run/test_stopping.py"),
    Mutant("rows of a torn journal are read up to the tear", "recorder.absorb(portion, words)", "pass",
           "tests/record"),
    Mutant("exit(3) of a rank is the command's status", "return status if isinstance(status, int) and 0 < status < 256 else error.exit_status",
           "return error.exit_status", "tests/cli tests/run"),
    Mutant("a signal gives 128 plus its number", "return 128 + process_setup.number_of(stop)", "return 1",
           "tests/cli tests/run/test_stopping.py"),
    Mutant("operations that ranks leave open are reported",
           "yield f\"{_count(left.total(), 'request')} never completed by Wait or Test: {_list(shown)}\"", "yield from ()",
           "tests/programs tests/virtual"),
    Mutant("each rank has its working directory", 'State("the working directory", "os.chdir os.fchdir", _get_folder, _set_folder),',
           "", "tests/programs/test_process_state.py"),
    Mutant("a rank that makes no call for long is named", "elif now_s - since_s >= NOTED_S[0]:", "elif False:",
           "tests/virtual/test_stalls.py"),
    Mutant("accept() that would wait is refused", "endless = task is not None and listening.gettimeout() is None",
           "endless = False", "tests/virtual/test_stalls.py tests/virtual/test_event_loops.py"),
    Mutant("mismatched collectives raise", "raise MismatchError(instance.mismatch)", "return None",
           "tests/virtual/test_endings.py tests/virtual/mpi/test_what_errors_say.py"),
    Mutant("a call of a stray thread ends the run", "    refuse = vars(threading.current_thread()).get(STRAY)",
           "    refuse = None", "tests/programs/test_process_state.py tests/programs/test_carrier.py"),
    Mutant("shares of links are max-min fair", "flight_s = min(whole.flight_s, empty.flight_s) if self._path(source, dest) else whole.flight_s",
           "flight_s = whole.flight_s", "tests/models/network"),
)  # fmt: skip


def main(chosen: list[int]) -> int:
    """Run the mutants; return the number of surviving ones."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "*_cache", ".hypothesis", "build", "runs", "demo")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for number, mutant in enumerate(MUTANTS, 1):
            if not chosen or number in chosen:
                began_s = time.monotonic()
                said = _caught(mutant, copy)
                survivors += said != "caught"
                print(
                    f"{number:2} {said:9} {time.monotonic() - began_s:4.0f} s  {mutant.promise}", flush=True
                )
    return survivors


def _caught(mutant: Mutant, copy: Path) -> str:
    files = [file for file in copy.glob("spawnsim/**/*.py") if mutant.old in file.read_text()]
    if len(files) != 1 or files[0].read_text().count(mutant.old) != 1:
        return f"in {len(files)} files"
    text = files[0].read_text()
    files[0].write_text(text.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=copy, env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}, timeout=TIME_LIMIT_S,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "caught"  # it hangs
    finally:
        files[0].write_text(text)
    return {0: "SURVIVES", 1: "caught"}.get(done.returncode, f"pytest {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main([int(each) for each in sys.argv[1:]]))
