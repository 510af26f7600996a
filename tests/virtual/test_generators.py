"""Every rank has the global generators that a process has; and what no seed repeats is noticed."""

import random
import subprocess
import sys
import threading
from random import random as drawn_by_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.random import rand as rand_by_name
from support.virtual_run import run

import spawnsim
from spawnsim.random import Streams
from spawnsim.real.runtime.rank import _rank_state, _set_rank
from spawnsim.virtual import reproducibility

RANKS = 10


def draws():
    """Return one number of each global generator, in all the ways that a program or a library gets at it."""
    return (
        random.random(), drawn_by_name(), random.Random().random(), np.random.rand(), rand_by_name(),
        np.random.mtrand._rand.rand(), np.random.default_rng().random(), np.random.RandomState().rand(),
        np.random.Generator(np.random.PCG64()).random(), float(torch.rand(1)), float(torch.randn(1)),
        float(torch.nn.functional.dropout(torch.arange(64.0)).sum()),
        float(torch.nn.Linear(3, 1).weight.detach().sum()),
    )  # fmt: skip


def drawn(seed, seeds=None, ranks=RANKS):
    """Return what each rank draws, twice with a meeting between; `seeds(rank)` may seed its generators first."""
    found = {}

    def main(comm):
        if seeds is not None:
            for each in (random.seed, np.random.seed, torch.manual_seed):
                each(seeds(comm.rank))
        found[comm.rank] = draws()
        comm.Barrier()
        found[comm.rank] += draws()

    run(main, ranks, seed=seed)
    return found


def test_ranks_draw_from_generators_of_their_own():
    """Unseeded ones differ from rank to rank and from seed to seed, and are the same each time."""
    found = drawn(7)
    assert all(len({found[rank][i] for rank in range(RANKS)}) > RANKS // 2 for i in range(len(found[0])))
    assert drawn(7) == found
    assert drawn(8)[3] != found[3]


def test_a_rank_more_changes_no_other_rank():
    """A rank's numbers depend on the seed and on its rank alone."""
    few, more = drawn(7, ranks=2), drawn(7, ranks=RANKS)
    assert (few[0], few[1]) == (more[0], more[1])


def test_a_rank_that_seeds_its_generators_draws_what_a_process_draws():
    """However ranks take turns: torch, numpy and Python's own, dropout included."""
    seeded = [0, 1, 3, 4, 5, 9, 10, 11]  # draws of generators that a program can seed from outside
    found = drawn(7, seeds=lambda rank: 100 + rank)
    for rank in (0, RANKS - 1):
        random.seed(100 + rank)
        np.random.seed(100 + rank)
        torch.manual_seed(100 + rank)
        alone = draws() + draws()
        half = len(alone) // 2
        for part in (0, half):
            assert [found[rank][part + i] for i in seeded] == [alone[part + i] for i in seeded]


SMALL_DRAWS = {  # between two turns: what a generator keeps of a pair of normal numbers, and all of its words
    "one of a pair of normal numbers": lambda own: torch.randn(1, dtype=torch.float64, generator=own),
    "one of a pair of short ones": lambda own: torch.randn(1, generator=own),
    "all words": lambda own: torch.rand(624, generator=own)[-1:],
    "a seed": lambda own: torch.tensor([0.5]) if (own or torch).manual_seed(5) else None,
}


@pytest.mark.parametrize("looked_at", [True, False], ids=["in memory", "by torch"])
@pytest.mark.parametrize("draw", SMALL_DRAWS)
def test_no_draw_between_two_turns_is_missed(draw, looked_at, monkeypatch):
    """Who has drawn nothing since its turn came is known by the memory of torch's generator, if that is found."""
    found, memory_of = {}, reproducibility._memory_of_generator
    assert memory_of(torch) is not None
    if not looked_at:
        monkeypatch.setattr(reproducibility, "_memory_of_generator", lambda torch: None)

    def main(comm):
        torch.manual_seed(comm.rank)
        torch.rand(1)
        own = []
        for turn in range(6):
            comm.Barrier()
            if turn % 3 != comm.rank % 3:
                own.append(float(SMALL_DRAWS[draw](None)))
        found[comm.rank] = (*own, float(torch.rand(1)))

    run(main, 6)
    for rank in range(6):
        own = torch.Generator().manual_seed(rank)
        torch.rand(1, generator=own)
        alone = [float(SMALL_DRAWS[draw](own)) for turn in range(6) if turn % 3 != rank % 3]
        assert found[rank] == (*alone, float(torch.rand(1, generator=own)))


def test_a_run_leaves_the_generators_as_they_were():
    """Also where they are drawn from outside the ranks, before and after, and where a run takes place in a rank."""
    functions = random.random, drawn_by_name, np.random.rand, np.random.mtrand._rand, random.Random.seed
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = [draws()[i] for i in (0, 3, 9)]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    inside = {}

    def main(comm):
        before = torch.rand(1)
        drawn(3, ranks=2)
        inside[comm.rank] = float(before), float(torch.rand(1))

    run(main, 2, seed=7)
    assert [draws()[i] for i in (0, 3, 9)] == expected
    assert functions == (
        random.random, drawn_by_name, np.random.rand, np.random.mtrand._rand, random.Random.seed,
    )  # fmt: skip
    plain = {}

    def main(comm):
        plain[comm.rank] = float(torch.rand(1)), float(torch.rand(1))

    run(main, 2, seed=7)
    assert plain == inside


TORCH_LATE = """
import sys
import spawnsim

def main(comm):
    import torch
    comm.record(x=float(torch.rand(1)))
    comm.Barrier()
    comm.record(x=float(torch.rand(1)))

assert "torch" not in sys.modules
run = spawnsim.run(main, ranks=3, seed=4)
print(run.table["x"].tolist(), run.totals["digest"])
"""


def test_torch_may_be_loaded_by_a_rank():
    """The rank that imports it first does not keep the generator that torch has seeded by chance."""
    outputs = {
        subprocess.run([sys.executable, "-c", TORCH_LATE], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


# ------------------------------------------------------------------------------------------------------ leaks

LEAKS = {
    "clock": ("import time", "time.perf_counter()", "the wall clock was read (time.perf_counter) by rank 1"),
    "date": ("import time", "time.strftime('%H')", "the wall clock was read (time.strftime) by rank 1"),
    "urandom": ("import os", "os.urandom(4)", "the system's entropy was read by rank 1"),
    "uuid": ("import uuid", "uuid.uuid4()", "the system's entropy was read by rank 1"),
    "secrets": ("import secrets", "secrets.token_hex()", "the system's entropy was read by rank 1"),
    "thread": (
        "import threading", "threading.Thread(target=print).start()", "a thread was started by rank 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAKS)
def test_what_no_seed_repeats_is_noticed(kind, tmp_path):
    """The run says so, and where."""
    load, leak, said = LEAKS[kind]
    program = tmp_path / "train.py"
    program.write_text(f"{load}\n\ndef main(comm):\n    if comm.rank == 1:\n        {leak}\n")
    what = spawnsim.run(program, ranks=2).what
    assert (what["reproducible"], what["leaks"]) == (False, [f"{said} (train.py:5)"])


def test_what_libraries_read_is_their_business(tmp_path):
    """Torch and spawnsim look at clocks; a program that does not is reproducible."""
    program = tmp_path / "train.py"
    program.write_text(
        "import logging, torch, tempfile, random\n\ndef main(comm):\n"
        "    logging.getLogger('train').error('of rank %d', comm.rank)\n"
        "    with comm.compute(1.0), tempfile.TemporaryDirectory():\n"
        "        torch.nn.Linear(3, 3)(torch.rand(3)).sum().backward()\n"
    )
    what = spawnsim.run(program, ranks=2, out=tmp_path / "out").what
    assert (what["reproducible"], what["leaks"]) == (True, [])


def test_what_a_private_package_does_is_the_program_s(tmp_path, monkeypatch):
    """Whether a thread that a package has started is done with its work, when a rank looks, no seed repeats."""
    package = tmp_path / "site-packages" / "begins_threads.py"
    package.parent.mkdir()
    package.write_text("import threading\n\ndef begin():\n    threading.Thread(target=print).start()\n")
    monkeypatch.syspath_prepend(package.parent)
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\nimport begins_threads\nbegins_threads.begin()\n")
    what = spawnsim.run(program, ranks=2, options={"private": ("begins_threads",)}).what
    leak = "a thread was started by rank 0 (begins_threads.py:4)"
    assert (what["reproducible"], what["leaks"]) == (False, [leak])


def test_the_command_line_fixes_the_order_of_sets(tmp_path):
    """Two runs of a program that walks through a set of words have one digest, and say that they are reproducible."""
    program = tmp_path / "train.py"
    program.write_text("def main(comm):\n    comm.record(x=str({'a', 'b', 'c', 'd', 'e', 'f'}))\n")
    environment = {"PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "spawnsim", "run", str(program), "--ranks", "2"]
    done = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(3)
    ]
    digests = {line for text in done for line in text.splitlines() if line.startswith(("digest", "reprod"))}
    assert len(digests) == 2
    assert "reproducible     yes" in digests


def test_runs_in_threads_do_not_take_each_other_s_patches_away():
    """The last of several runs at once puts everything back."""
    before = random.random, np.random.rand
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(run(lambda comm: comm.Barrier(), 20)[0].digest))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert (random.random, np.random.rand) == before


def test_ranks_have_settings_of_torch_of_their_own():
    """Default dtype, print options, deterministic algorithms: what one rank sets no other sees, nor who comes after."""
    found = {}

    def state():
        return (
            torch.get_default_dtype(),
            str(torch.tensor([1 / 3], dtype=torch.float32)),
            torch.are_deterministic_algorithms_enabled(),
        )

    def main(comm):
        if comm.rank % 3 == 1:
            torch.set_default_dtype(torch.float64)
            torch.set_printoptions(precision=2)
        if comm.rank % 3 == 2:
            torch.use_deterministic_algorithms(True)
        comm.Barrier()
        found[comm.rank] = state()
        comm.Barrier()

    torch.set_printoptions(precision=6)
    before = state()
    try:
        run(main, RANKS)
        assert state() == before == (torch.float32, "tensor([0.333333])", False)
    finally:
        torch.set_printoptions(profile="default")
    double = torch.float64, "tensor([0.33], dtype=torch.float32)", False
    own = [before, double, (torch.float32, "tensor([0.333333])", True)]
    assert found == {rank: own[rank % 3] for rank in range(RANKS)}


def test_a_rank_that_does_not_draw_keeps_no_state_of_torch_s():
    """5 kB a rank; only the head of a state tells whether a rank has drawn, and it must be read while it is there."""
    kept = {}

    def main(comm):
        for _ in range(3):
            with comm.compute(0.01):
                pass
            if comm.rank % 5 == 0:
                torch.rand(1)
            comm.Barrier()
        comm.Barrier()
        if comm.rank == 1:
            kept.update({rank.id: rank.generators._torch is not None for rank in comm._world.ranks})

    run(main, 20)
    assert kept == {rank: rank % 5 == 0 for rank in range(20)}


# -------------------------------------------------------------------------------------------------------- GPUs
class Generator:
    """As torch's of a GPU: a seed, and an offset that each draw moves on."""

    def __init__(self):
        self._seed, self._offset = 0, 0

    def initial_seed(self):
        return self._seed

    def get_offset(self):
        return self._offset

    def set_offset(self, offset):
        self._offset = offset

    def manual_seed(self, seed):
        self._seed, self._offset = seed, 0

    def draw(self):
        self._offset += 4
        return random.Random(f"{self._seed} {self._offset}").random()


class GPU:
    """What draws on a GPU, which torch knows only once it is `found`: it has kept the last seed that was set."""

    def __init__(self, monkeypatch):
        self.generator, self._seed = Generator(), 0
        monkeypatch.setattr(torch.cuda, "default_generators", ())
        monkeypatch.setattr(torch.cuda, "_lazy_init", self.found)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self._manual_seed)

    def found(self):
        if not torch.cuda.default_generators:
            torch.cuda.default_generators = (self.generator,)
            self.generator.manual_seed(self._seed)

    def _manual_seed(self, seed):
        self._seed = seed
        for each in torch.cuda.default_generators:
            each.manual_seed(seed)

    def draw(self):
        torch.cuda._lazy_init()
        return self.generator.draw()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that nobody has used."""
    return GPU(monkeypatch)


@pytest.mark.parametrize("when", ["before the run", "by the first rank that draws"])
def test_ranks_draw_on_a_gpu_from_generators_of_their_own(gpu, when):
    """As on the CPU: of rank and seed alone, in whatever order ranks come; the run leaves them as they were."""
    torch.manual_seed(5)
    if when == "before the run":
        gpu.found()
    first = {}

    def main(comm):
        with comm.compute(0.01 * ((comm.rank + 3) % RANKS)):  # rank 7 is the first
            pass
        found = [gpu.draw(), gpu.draw()]
        comm.Barrier()
        found.append(gpu.draw())
        comm.Barrier()
        torch.manual_seed(comm.rank)
        comm.Barrier()
        found.append(gpu.draw())
        first[comm.rank] = found

    run(main, RANKS, seed=7)
    once, first = first, {}
    assert (gpu.generator.initial_seed(), gpu.generator.get_offset()) == (5, 0)
    assert len({each for draws in once.values() for each in draws}) == 4 * RANKS
    run(main, RANKS, seed=7)
    assert first == once
    for rank, draws in once.items():
        gpu.generator.manual_seed(rank)
        assert gpu.draw() == draws[3]


def test_a_seed_that_a_rank_sets_before_it_uses_a_gpu_counts_for_it_alone(gpu):
    """Torch keeps the last seed that anybody has set, until it finds the GPU."""
    found = {}

    def main(comm):
        torch.manual_seed(100 + comm.rank)
        comm.Barrier()
        found[comm.rank] = gpu.draw()

    run(main, RANKS, seed=7)
    for rank, drawn_there in found.items():
        gpu.generator.manual_seed(100 + rank)
        assert gpu.draw() == drawn_there


def test_a_real_rank_goes_on_with_what_it_drew_on_a_gpu(gpu, monkeypatch):
    """The process that resumes has not found its GPU yet, and torch has a seed for it already."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", gpu.found)
    comm = SimpleNamespace(rng=Streams(7, 3), clock=SimpleNamespace(now=lambda: 1.0))
    before = torch.get_rng_state()
    torch.manual_seed(5)
    gpu.draw()
    saved = _rank_state(comm)
    expected = gpu.draw(), torch.rand(2).tolist()
    torch.cuda.default_generators = ()
    torch.manual_seed(99)
    _set_rank(comm, saved)
    assert (gpu.draw(), torch.rand(2).tolist()) == expected
    torch.set_rng_state(before)
