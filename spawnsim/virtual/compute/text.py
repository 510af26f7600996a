"""Compute models and stragglers in words, as the command line and platform files write them.

This room knows the text forms and their units. It must not know what the objects do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.virtual.compute.episodes import Markov
from spawnsim.virtual.compute.model import Fixed
from spawnsim.virtual.compute.noise import Bimodal, Exponential, Gamma, Lognormal, Pareto
from spawnsim.virtual.compute.persistent import Constant, Slow, SlowRank, Speed
from spawnsim.virtual.compute.straggler import Straggler
from spawnsim.virtual.compute.trace import Trace

_Form = tuple[str, Callable[..., Straggler], tuple[Callable[[str], float], ...]]

FORMS: tuple[_Form, ...] = (
    ("constant", Constant, ()),
    ("constant:FACTOR", Constant, (float,)),
    ("lognormal:SIGMA", Lognormal, (float,)),
    ("exponential:SHARE", Exponential, (float,)),
    ("pareto:TAIL", Pareto, (float,)),
    ("gamma:VARIATION", Gamma, (float,)),
    ("bimodal:SHARE,SLOWDOWN", Bimodal, (float, float)),
    ("speed:SIGMA", Speed, (float,)),
    ("slow:SHARE,SLOWDOWN", Slow, (float, float)),
    ("rank:RANK,SLOWDOWN", SlowRank, (int, float)),
    ("markov:FAST,SLOW,SLOWDOWN", Markov, (units.seconds, units.seconds, float)),
)
"""Pattern, class and the readers of its parameters."""


def parse_stragglers(text: str | Straggler | Sequence[Straggler] | None) -> tuple[Straggler, ...]:
    """Return the stragglers that a text such as "lognormal:0.3+slow:0.02,5" names; objects pass through.

    Noise (lognormal, exponential, pareto, gamma) and `speed` have mean 1 and keep the mean step time. `bimodal`,
    `slow`, `rank` and `markov` add their slowdown to it.

    >>> [straggler.mean for straggler in parse_stragglers("lognormal:0.3+slow:0.02,5")]
    [1.0, 1.08]
    """
    if text is None or text == "":
        return ()
    if isinstance(text, Straggler):
        return (text,)
    if not isinstance(text, str):
        return tuple(text)
    return tuple(_straggler(part.strip(), text) for part in text.split("+"))


def _straggler(part: str, whole: str) -> Straggler:
    name, _, rest = part.partition(":")
    words = [word.strip() for word in rest.split(",")] if rest else []
    for pattern, build, readers in FORMS:
        if pattern.partition(":")[0] == name and len(readers) == len(words):
            try:
                return build(*(read(word) for read, word in zip(readers, words, strict=True)))
            except ValueError as error:  # ParameterError is one as well
                raise ParameterError(f"straggler {part!r}: {error}") from error
    where = f" in {whole!r}" if part != whole else ""
    forms = ", ".join(pattern for pattern, _, _ in FORMS)
    raise ParameterError(f"straggler {part!r}{where} is not of a known form. Forms, joined by +: {forms}")


def parse_base(text: str | float | Fixed | Trace) -> Fixed | Trace:
    """Return the base of a compute model: a duration ("10 ms", 0.01) or a recorded run.

    A run is its folder, then options: "runs/a,cycle,resample,without-slowest:1" (see `Trace`).
    """
    if isinstance(text, (Fixed, Trace)):
        return text
    if not isinstance(text, str):
        return Fixed(float(text))
    folder, *options = text.split(",")
    if Path(folder).is_dir():
        return _trace(folder, options)
    try:
        return Fixed(units.seconds(text))
    except ParameterError as error:
        raise ParameterError(
            f"compute {text!r}: neither a duration ({error}) nor a run folder that exists"
        ) from None


def _trace(folder: str, options: list[str]) -> Trace:
    leave_out = 0
    flags = {"cycle": False, "resample": False}
    for option in options:
        name, _, value = option.partition(":")
        if name == "without-slowest" and (value or "1").isdecimal():
            leave_out = int(value or "1")
        elif name in flags and not value:
            flags[name] = True
        else:
            raise ParameterError(f"compute option {option!r}: one of cycle, resample, without-slowest:N")
    return Trace.of_run(folder, **flags).without_slowest(leave_out)
