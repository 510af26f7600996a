"""Which runs are one experiment, the data of a run that figures need, and their names in legends and captions.

Runs belong to one experiment, and share a curve, if they differ only in their seed. Program, parameters, ranks,
backend, platform, stragglers, faults, compute times, versions and the content of input files must be equal. Differing
facts name a curve.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from spawnsim.errors import ParameterError
from spawnsim.plots.series import Table
from spawnsim.run import Run
from spawnsim.run.result import FINISHED, is_rank, recorded_donors

REAL = {"mpi": " (real MPI)", "torch": " (real torch)"}  # ends the label of runs on real processes
# How the run was made, and observations about it.
NO_EXPERIMENT = {"made", "processes", "reproducible", "leaks", "notes", "warnings"}
APART = {"parameters", "inputs", "versions", "file_digest"}  # these hold several facts each
KNOWN_ENDINGS = ("running", "interrupted", "stopped by ")  # outcomes that are not errors
LONGEST = 28  # characters of one value in a label


class Recorded(Protocol):
    """A finished run: `what` ran, its `totals`, its `table` of columns, its `events`, and its `outcome`."""

    @property
    def what(self) -> Mapping[str, Any]: ...
    @property
    def totals(self) -> Mapping[str, Any]: ...
    @property
    def table(self) -> Table: ...
    @property
    def events(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def outcome(self) -> str: ...


def read(folder: str | Path) -> Run:
    """Load a run folder; a failed run is loaded as far as it was recorded.

    Raises:
        ParameterError: the folder holds no run, or a file of it is damaged.
    """
    return Run.load(folder)


def ranks_of(run: Recorded) -> int:
    """Return the number of ranks."""
    # A killed run has no totals, and a run that resumed with fewer ranks has rows of more ranks: count rows, too.
    return max(int(run.totals.get("ranks") or 0), int(run.table["rank"].max(initial=-1)) + 1)


def is_real(run: Recorded) -> bool:
    """Return whether the run took place on real processes."""
    return str(run.what.get("backend") or "virtual") != "virtual"


def clock_of(runs: Sequence[Recorded]) -> str:
    """Return the label of an axis with the ranks' clocks: virtual seconds if any run is virtual."""
    return "time (s)" if all(map(is_real, runs)) else "virtual time (s)"


def donors_of(event: Mapping[str, Any], ranks: int) -> list[int]:
    """Return the donor ranks of an event; in a program's own events, all entries that are ranks."""
    # A program may itself record events with these names, with any content.
    donors = recorded_donors(event)
    found = donors if isinstance(donors, (list, tuple)) else []
    return [each for each in found if is_rank(each) and each < ranks]


# ----------------------------------------------------------------------------------------------------------- facts
class Fact(NamedTuple):
    """One property in which two runs can differ: its text in a label, and its value."""

    shown: str
    value: str


def facts(run: Recorded) -> dict[str, Fact]:
    """Return, by name, all properties that identify a run's experiment, and its seed."""
    what = run.what
    # Labels begin with the policy.
    found = {"policy": Fact("", "")} if "policy" in _mapping(what, "parameters") else {}
    for name, value in what.items():
        if name not in NO_EXPERIMENT | APART:
            found[name] = _circumstance(name, value)
    # Set again after the loop: the number in `what` may be missing while the totals have it.
    found["ranks"] = Fact(f"{ranks_of(run):,} ranks", str(ranks_of(run)))
    for name, value in _mapping(what, "parameters").items():
        # A parameter may be called "seed" or "platform": it must not replace the run's own.
        found[name if name not in found or name == "policy" else f"main's {name}"] = _parameter(name, value)
    # For a function without a file, only the names of its parameters are known.
    if not (what.get("file") or what.get("columnar")):
        names = ", ".join(_mapping(what, "parameters"))
        found["parameters"] = Fact(f"parameters {names}", names)
    files = {f"program/{what.get('file')}": what.get("file_digest")} if what.get("file_digest") else {}
    # By content: two files with one name may differ, and a moved file is the same.
    for name, digest in (files | dict(_mapping(what, "inputs"))).items():
        found[name] = Fact(f"{Path(name).name} {str(digest)[:4]}", str(digest))
    for name, version in _mapping(what, "versions").items():
        found[f"version of {name}"] = Fact(f"{name} {version}", str(version))
    return found


def _mapping(what: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = what.get(name)
    return value if isinstance(value, Mapping) else {}


def _circumstance(name: str, value: Any) -> Fact:
    word = name.removesuffix("_s").replace("_", " ")
    if name in ("platform", "compute", "file") and isinstance(value, str) and "/" in value:
        value = Path(value).name  # the file's content is a separate fact
    # One value for all ways to give nothing, or runs from Python and from the command line would be two experiments.
    if value in (None, "", "none"):
        return Fact({"platform": "default platform"}.get(name, f"no {word}"), "")
    if name in ("platform", "file"):
        return Fact(
            Path(str(value)).stem if str(value).endswith((".toml", ".py")) else _short(value), str(value)
        )
    plain = name in ("stragglers", "main", "backend")
    return Fact(_short(value) if plain else f"{word} {_short(value)}", str(value))


LACKING = (None, "", "none")  # values of a circumstance that is absent
WORLD = ("platform", "stragglers", "faults", "compute", "deadline_s", "ties", "sums")
CIRCUMSTANCES = {"file", "backend", *WORLD}


def shown(name: str, value: Any) -> str:
    """Return a parameter or a circumstance of a run as text for labels: "ratio 0.1", "no stragglers", "64 ranks"."""
    if name == "ranks":
        return f"{value:,} ranks" if isinstance(value, int) else f"{value} ranks"
    return (_circumstance if name in CIRCUMSTANCES else _parameter)(name, value).shown


def _parameter(name: str, value: Any) -> Fact:
    if name == "policy":
        return Fact(str(value or "none"), str(value))
    # As "mine" and "no mine", the values of a parameter would not be recognised.
    if isinstance(value, bool):
        return Fact(f"{name}={value}", str(value))
    return Fact(f"{name} {_short(value)}", str(value))


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# ---------------------------------------------------------------------------------------------------------- groups
@dataclass(frozen=True)
class Group:
    """Runs that share a curve: `name` has the distinguishing facts, `label` also where they ran and how they ended."""

    name: str
    runs: tuple[Recorded, ...]

    @property
    def real(self) -> bool:
        return is_real(self.runs[0])

    @property
    def label(self) -> str:
        """The name in a legend."""
        backend = str(self.runs[0].what.get("backend"))
        ends = [run.outcome for run in self.runs if run.outcome != FINISHED]
        # An error's text is too long for a legend; captions and reports show it.
        ends = [each if each.startswith(KNOWN_ENDINGS) else "failed" for each in ends]
        some = f"{len(ends)} of {len(self.runs)} not finished" if len(self.runs) > 1 else "".join(ends)
        place = REAL.get(backend, f" (real {backend})") if self.real else ""
        return f"{self.name}{place}{f' ({some})' if ends else ''}"


@dataclass(frozen=True)
class Groups:
    """All runs of a figure or a page, grouped by curve. `differ`: the facts that distinguish the curves."""

    groups: tuple[Group, ...]
    differ: tuple[str, ...] = ()
    pooled: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def runs(self) -> tuple[Recorded, ...]:
        return tuple(run for group in self for run in group.runs)

    @property
    def named(self) -> list[tuple[str, Recorded]]:
        """All runs with unique names: the group's label, with the seed if the group has more than one run."""
        found: dict[str, Recorded] = {}
        for group in self:
            for run in group.runs:
                name = f"{group.label}, seed {run.what.get('seed')}" if len(group.runs) > 1 else group.label
                found[_unused(name, found)] = run
        return list(found.items())

    def alone(self, wanted: Callable[[Recorded], bool], most: int) -> list[tuple[str, Recorded]]:
        """Return the runs to show one by one.

        Args:
            wanted: whether a run has the data to show.
            most: if more runs have it, only the first run of each curve is returned, under the curve's name.

        Returns:
            Names and runs.
        """
        found = [(name, run) for name, run in self.named if wanted(run)]
        if len(found) <= most:
            return found
        return [(group.label, run) for group in self if (run := next(filter(wanted, group.runs), None))]

    @property
    def by(self) -> str:
        """The facts that distinguish the curves, for a title: " by policy and ratio"; empty for a single curve."""
        names = [
            "number of ranks" if name == "ranks" else name.replace("_", " ")
            for name in self.differ if name != "backend"
        ]  # fmt: skip
        # More than three names make the title unreadable; the legend shows them.
        if len(self.groups) == 1 or not 0 < len(names) <= 3:
            return ""
        return f" by {' and '.join([*filter(None, [', '.join(names[:-1])]), names[-1]])}"

    def caption(self) -> str:
        """Return a caption: where the runs executed, their parameters, pooled facts, and runs that did not finish."""
        files = {str(run.what.get("file") or run.what.get("main") or "") for run in self.runs}
        program = [*files] if len(files) == 1 and "" not in files else []
        lines = [" · ".join([*program, setting(self.runs)]), self._shared()]
        pooled = f"curves pool runs that differ in {', '.join(self.pooled)}" if self.pooled else ""
        return "\n".join(line for line in (*lines, pooled, self.endings()) if line)

    def endings(self) -> str:
        """Return which runs did not finish, and why."""
        found = []
        for group in self:
            for run in group.runs:
                if run.outcome != FINISHED:
                    seed = f", seed {run.what.get('seed')}" if len(group.runs) > 1 else ""
                    found.append(f"{group.name}{seed}: {_first_words(run.outcome)}")
        more = " …" * (len(found) > 4)
        return f"not finished, shown as far as recorded: {'; '.join(found[:4])}{more}" if found else ""

    def _shared(self) -> str:
        """Return the parameters that all runs share."""
        known = [facts(run) for run in self.runs]
        given = _mapping(self.runs[0].what, "parameters")
        names = [name for name, value in given.items() if value not in (None, "", [], {})]
        same = [name for name in names if len({found.get(name) for found in known}) == 1]
        return ", ".join(
            f"{'policy ' * (name == 'policy')}{known[0][name].shown}" for name in same if name in known[0]
        )


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    names = itertools.chain([name], (f"{name} ({count})" for count in itertools.count(2)))
    return next(each for each in names if each not in taken)


def grouped(runs: Sequence[Recorded] | Groups, by: Sequence[str] = (), labels: Sequence[str] = ()) -> Groups:
    """Return runs as groups, in order of first appearance.

    Args:
        runs: the runs; groups are returned as they are.
        by: names of facts (parameters of `main`, ranks, platform, seed …) that distinguish groups; empty: all that
            differ except the seed. Runs that then share a group are pooled, and captions say so.
        labels: names of the groups, instead of names made of their differences.

    Returns:
        The groups.

    Raises:
        ParameterError: `by` names an unknown fact, or the number of labels is not the number of groups.
    """
    if isinstance(runs, Groups):
        return runs
    known = [facts(run) for run in runs]
    for name in by:
        if not any(name in found for found in known):
            differing = ", ".join(_differing(known)) or "nothing"
            raise ParameterError(f"--by {name}: the runs do not differ in it; they differ in {differing}")
    # An interval is over seeds, so the seed distinguishes curves only on request.
    apart = list(by) if by else [name for name in _differing(known) if name != "seed"]
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, found in enumerate(known):
        # By value, not by text: two values that are shortened for a label may read alike.
        key = tuple(found[name].value if name in found else None for name in apart)
        members.setdefault(key, []).append(index)
    found_groups: list[Group] = []
    for places in members.values():
        first, chosen = known[places[0]], tuple(runs[place] for place in _distinct_runs(places, runs))
        name = ", ".join(first[name].shown for name in apart if name in first and name != "backend")
        found_groups.append(_added(Group(name or label(chosen[0]), chosen), found_groups))
    if labels:
        if len(labels) != len(found_groups):
            curves = "; ".join(group.label for group in found_groups)
            raise ParameterError(f"{len(labels)} labels for {len(found_groups)} curves: {curves}")
        pairs = zip(found_groups, labels, strict=True)
        found_groups = [replace(group, name=name) for group, name in pairs]
        # From here on, labels are the keys of looks and of curves.
        if len({group.label for group in found_groups}) < len(found_groups):
            raise ParameterError(f"labels {', '.join(labels)}: give each curve a different label")
    # The caption names the facts that a chosen grouping pools: an interval over pooled runs is not over seeds alone.
    within = [name for places in members.values() for name in _differing([known[place] for place in places])]
    pooled = [name for name in dict.fromkeys(within) if name not in ("seed", *apart)] if by else []
    return Groups(tuple(found_groups), tuple(apart), tuple(pooled))


def _added(group: Group, others: Sequence[Group]) -> Group:
    """Return a group with a unique label: shortened values may read alike."""
    taken = {each.label for each in others}
    names = (replace(group, name=f"{group.name} ({count})") for count in itertools.count(2))
    return next(each for each in itertools.chain([group], names) if each.label not in taken)


def _differing(known: Sequence[Mapping[str, Fact]]) -> list[str]:
    """Return the facts that have at least two values; a run without a fact does not differ in it."""
    names = {name: None for found in known for name in found}
    # A real run has no platform, so it may share a group with its virtual twins.
    return [name for name in names if len({found[name].value for found in known if name in found}) > 1]


def _distinct_runs(places: Sequence[int], runs: Sequence[Recorded]) -> list[int]:
    """Leave out virtual runs that repeat another run, with equal facts and digest: they add nothing."""
    seen: dict[object, int] = {}
    for place in places:
        # Two real runs with one seed are two measurements, whatever their digests.
        digest = None if is_real(runs[place]) else runs[place].totals.get("digest")
        seen.setdefault((str(digest), *facts(runs[place]).items()) if digest else place, place)
    return list(seen.values())


# ----------------------------------------------------------------------------------------------- names and captions
def label(run: Recorded) -> str:
    """Return the name of a single run: its policy, or else its file."""
    parameters = _mapping(run.what, "parameters")
    file = Path(str(run.what.get("file") or run.what.get("main") or "run")).stem
    return str(parameters["policy"] or "none") if "policy" in parameters else file


def _first_words(text: str, most: int = 70) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _distinct(runs: Sequence[Recorded], name: str) -> list[str]:
    known = [facts(run) for run in runs if run.what.get(name) not in LACKING]
    return list(dict.fromkeys(found[name].shown for found in known if name in found))


def setting(runs: Sequence[Recorded]) -> str:
    """Return ranks, platform, stragglers, faults and seeds of runs, for the caption of a figure."""
    parts = []
    kinds = dict.fromkeys(str(run.what.get("backend") or "virtual") for run in runs)
    for kind in sorted(kinds, key=lambda each: each != "virtual"):
        sizes = sorted({ranks_of(run) for run in runs if str(run.what.get("backend") or "virtual") == kind})
        name = "virtual ranks" if kind == "virtual" else f"{REAL.get(kind, kind).strip(' ()')} ranks"
        parts.append(" and ".join(f"{size:,}" for size in sizes) + f" {name}")
    # With very many ranks only some have rows; the totals count all of them.
    columnar = [run for run in runs if run.what.get("columnar")]
    sampled = {size: None for run in columnar if (size := int(run.what["sample"])) < ranks_of(run)}
    if sampled:
        parts.append(f"rows of {' and '.join(f'{size:,}' for size in sampled)} of them")
    virtual = [run for run in runs if not is_real(run)]
    for name, word in (("platform", ""), ("stragglers", "stragglers "), ("faults", "")):
        values = _distinct(virtual, name)
        # If only some runs have the circumstance, the common caption must not claim it for each.
        if values and name != "platform" and any(run.what.get(name) in LACKING for run in virtual):
            values.insert(0, "none" if word else f"no {name}")
        parts += [word + " / ".join(values[:4]) + " …" * (len(values) > 4)] if values else []
    seeds = {str(run.what["seed"]) for run in runs if run.what.get("seed") is not None}
    first, *more = sorted(seeds, key=lambda seed: (len(seed), seed)) or [""]
    if seeds:
        parts.append(f"{len(seeds)} seeds ({first} … {more[-1]})" if more else f"seed {first}")
    return " · ".join(parts)
