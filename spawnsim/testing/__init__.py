"""Tests that run on virtual ranks, under many seeds, faults and orders of events.

    from spawnsim.testing import virtual

    @virtual(ranks=64, seeds=20, faults="crash; delay")
    def test_everybody_has_the_mean(comm):
        ...

Each rank runs the body, as `main(comm)`. With a file (`@virtual("train.py", ...)`), the test is called with each run
that finished without an error, to check its records. `pytest -p spawnsim.testing` adds the options that replay a
failure.
"""

from __future__ import annotations

import functools
import inspect
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["virtual"]

PYTEST = "pytest -p spawnsim.testing"
SEED, CASE = "--spawnsim-seed", "--spawnsim-case"
MODE, RANKS, PRIVATE = "--spawnsim", "--spawnsim-ranks", "--spawnsim-private"
SEEDS = 20


def pytest_addoption(parser: Any) -> None:
    """Add the options that replay a failure."""
    group = parser.getgroup("spawnsim")
    group.addoption(
        SEED,
        type=int,
        metavar="K",
        help="run only the case of this seed, unchanged, in tests on virtual ranks",
    )
    group.addoption(CASE, metavar="JSON", help="run only this case, in the form that a failure report shows")
    group.addoption(
        MODE, action="store_true", help="run tests that start processes on virtual ranks, in this process"
    )
    group.addoption(
        RANKS,
        type=lambda text: text if text == "marks" else int(text),
        metavar="N",
        help="run all tests on N virtual ranks, as mpiexec -n N pytest does; marks: each on as many as its mark says",
    )
    group.addoption(
        PRIVATE,
        action="append",
        metavar="PACKAGE",
        help="with the ranks, import an installed package once for each rank",
    )


def pytest_configure(config: Any) -> None:
    """Let test cases run on virtual ranks, if the session asks for it."""
    if ranks := config.getoption(RANKS, None):
        from spawnsim.testing import sessions

        for mark in ("parallel(n): run on n ranks", "mpi(min_size): run on so many ranks at least"):
            config.addinivalue_line("markers", mark)
        if not sessions.is_on_a_rank():
            config.pluginmanager.register(sessions.Outer(None if ranks == "marks" else ranks))
    elif config.getoption(MODE, False):
        from spawnsim.testing import torch_cases

        stack = ExitStack()
        config.add_cleanup(stack.close)
        torch_cases.on_virtual_ranks(stack.enter_context)
        config.pluginmanager.register(torch_cases.Starting())


def virtual(
    program: str | Path | None = None,
    *,
    ranks: int | Sequence[int],
    seeds: int = SEEDS,
    faults: str = "none",
    ties: Sequence[str] = ("fifo", "reverse", "random"),
    stragglers: Sequence[str | None] = (None, "lognormal:0.3"),
    parameters: Mapping[str, Any] | None = None,
    survive: bool = False,
    alive_s: float = math.inf,
    shrink: bool = True,
    **world: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test on virtual ranks, once for each of several seeds.

    Args:
        program: a file to run, relative to the test's own; the test is then called with each run that finished without
            an error. None: each rank runs the test, with the communicator as first argument, followed by its fixtures.
        ranks: number of ranks, or several numbers to draw from.
        seeds: number of cases.
        faults: kinds to draw from, and faults that happen in each case; see `spawnsim.fuzzing.Space`.
        ties: orders of simultaneous events to draw from.
        stragglers: straggler models to draw from.
        parameters: keyword arguments of the program; `iterations` is reduced in a failing case.
        survive: ending in `RankFailed`, `Revoked` or `Timeout` is a failure too, whatever the faults.
        alive_s: virtual seconds after the last fault within which each rank must make progress.
        shrink: whether to reduce a failing case, with the same error and among the `ranks` above.
        world: further settings: platform, compute, deadline_s, argv.

    Returns:
        A decorator that turns a function into a test.

    Raises:
        ParameterError: an argument is invalid.
    """
    from spawnsim.fuzzing.cases import Space

    space = Space(
        ranks=[ranks] if isinstance(ranks, int) else list(ranks), faults=faults, ties=tuple(ties),
        stragglers=tuple(stragglers), parameters=dict(parameters or {}), world=world, survive=survive, alive_s=alive_s,
    )  # fmt: skip

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(test).parameters.values())

        @functools.wraps(test)
        def wrapper(*args: Any, request: Any, **fixtures: Any) -> None:
            given = set(parameters or ())
            target = _target(
                program, test, args, {name: v for name, v in fixtures.items() if name not in given}
            )
            _hold(target, space, seeds, request, shrink=shrink)

        first = 1 if names and names[0].name == "self" else 0
        kept = [each for at, each in enumerate(names) if at != first and each.name not in (parameters or ())]
        request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
        if not any(each.name == "request" for each in kept):
            kept = [*(each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in kept), request]
        wrapper.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _target(
    program: str | Path | None, test: Callable[..., Any], args: Sequence[Any], fixtures: Mapping[str, Any]
) -> Any:
    """Return the target: the test's body on each rank, or a file whose runs the test checks."""
    from spawnsim.fuzzing.campaign import Target

    if program is not None:
        path = Path(inspect.getfile(test)).parent / program
        return Target(path, check=lambda run: test(*args, run, **fixtures))

    def main(comm: Any, **parameters: Any) -> None:
        test(*args, comm, **fixtures, **parameters)

    main.__name__ = test.__name__
    return Target(main)


def _hold(target: Any, space: Any, seeds: int, request: Any, *, shrink: bool) -> None:
    """Run the cases of a test, and fail it with the first failure."""
    import pytest

    from spawnsim.fuzzing.campaign import attempt, campaign
    from spawnsim.fuzzing.cases import Case
    from spawnsim.run.process_setup import one_thread

    one, exact = request.config.getoption(SEED, None), request.config.getoption(CASE, None)
    node = shlex.quote(request.node.nodeid)
    if exact is not None:
        with one_thread():
            failure = attempt(target, Case.from_json(exact, space.world))[0]
        if failure is not None:
            pytest.fail(_described(failure), pytrace=False)
        return
    chosen = range(seeds) if one is None else range(one, one + 1)
    found = campaign(target, space, chosen, jobs=0, shrink=shrink and one is None, most=1)
    if not found.failures:
        return
    key, failure = next(iter(found.failures.items()))
    parts = [f"{_described(failure)}\nas found:     {PYTEST} {node} {SEED} {failure.case.seed}"]
    small = found.small.get(key, failure)
    if small.case != failure.case:
        case = shlex.quote(small.case.to_json())
        parts.append(
            f"The same error in the smallest case:\n{_described(small)}\nreplay:       {PYTEST} {node} {CASE} {case}"
        )
    pytest.fail("\n\n".join(parts), pytrace=False)


def _described(failure: Any) -> str:
    """Return the failure, its case, and the positions of the ranks."""
    from spawnsim.units import counted

    case = failure.case
    facts = [
        counted(case.ranks, "rank"),
        f"seed {case.seed}", f"ties {case.ties}", f"faults {case.faults or 'none'}",
        *([f"straggler {case.straggler}"] if case.straggler else []),
        *(f"{name}={value!r}" for name, value in case.parameters.items()),
    ]  # fmt: skip
    message = (
        failure.message if failure.message.startswith(failure.what) else f"{failure.what}: {failure.message}"
    )
    return "\n".join(filter(None, [message, ", ".join(facts), failure.table]))
