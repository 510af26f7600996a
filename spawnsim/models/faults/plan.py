"""The fault plan of a run: its notation as text and as JSON, and the queries of a kernel.

    crash:17@3.5s               restart:17@9s              pause:3@1s+6s            slow:4@1s+10s,3
    down:0>1@2s+1s              drop:*>3@0s+5s,0.1         delay:2<>*@1s+2s,5ms,1ms
    duplicate:0>1@0s,0.5        corrupt:0>1@0s,0.01        partition:0-3,8@5s+2s

    clog:node2@1s+1s            reorder:*>0@0s,20ms        skew:4@1s,0.5s,1e-3       corrupt:0>1@0s,0.01,nan
    mtbf:node*@0s+100s,50s,2s   (Poisson; mean time between failures, time to repair; then spares, time to swap)
    requeue:node*@0s+100s,50s,2s   (the same; each failure ends the job, and the whole job begins again)

KIND:WHERE@START[+LENGTH][,PARAMETERS], joined by ";". WHERE is ranks ("3", "0-3,8", "*"), parts of the platform
("node2", "rack0", "region1", "job") or a link ("0>1", "2<>*" for both ways, "*" for any rank). Without LENGTH a fault
lasts for ever. Files: JSON, TOML ([[faults]] with the same names), and CSV of a recorded trace (rank,down_s,up_s).

Each answer of a plan is a function of rank, time and message number alone: the order of the queries, and thus the
order in which ranks happen to run, changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.models.faults.events import (
    DELIVERED,
    KINDS,
    LOST,
    Crash,
    Fault,
    LinkFault,
    Partition,
    Pause,
    Restart,
    Skew,
    SlowDown,
    Verdict,
    no_kind,
)
from spawnsim.models.faults.failures import Failures, machines, recorded
from spawnsim.models.network.cost import Floats, Ints

_PART = re.compile(r"(?P<kind>[a-z]+):(?P<where>[^@]+)@(?P<at>[^+,]+)(\+(?P<length>[^,]+))?(,(?P<rest>.*))?")
_WHERE = ("rank", "members", "source", "dest", "at_s", "for_s")
MTBF = "mtbf"  # failures of machines: expands to many crashes and restarts
REQUEUE = "requeue"  # the same, and each failure ends the job, which begins again as a whole
MTBF_FORM = "mtbf:RANKS@START+LENGTH,MTBF[,REPAIR][,SPARES][,SWAP]"
MOST_NBYTES = 1 << 26  # size of a file
FORM = "KIND:WHERE@START[+LENGTH][,PARAMETERS], such as crash:17@3.5s, pause:3@1s+6s or drop:*>3@0s+5s,0.1"


def form(kind: type[Fault]) -> str:
    """Return how a fault of a kind is written.

    >>> form(KINDS["pause"])
    'pause:RANKS@START[+LENGTH]'
    """
    parts = fields(kind)
    where = "FROM>TO" if issubclass(kind, LinkFault) else "RANKS"
    length = "[+LENGTH]" * any(part.name == "for_s" for part in parts)
    own = [
        (f",{part.name.removesuffix('_s').upper()}", part.default)
        for part in parts
        if part.name not in _WHERE
    ]
    return f"{kind.kind}:{where}@START{length}" + "".join(
        word if default is MISSING else f"[{word}]" for word, default in own
    )


class Setting(NamedTuple):
    """The run that a plan is for: the meaning of "*", "node2" and similar names there, and the seed of the draws."""

    ranks: int | None = None
    network: Any = None
    seed: int = 0


def from_text(words: str, setting: Setting = Setting()) -> tuple[Fault, ...]:  # noqa: B008  immutable
    """Return the faults that a text names."""
    parts = [part.strip() for part in words.split(";")]
    return tuple(fault for part in parts if part for fault in _faults(part, setting))


def _faults(part: str, setting: Setting) -> Iterator[Fault]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ParameterError(f"fault {part!r}: write {FORM}")
    if match["kind"] in (MTBF, REQUEUE):
        yield from _failures(part, match, setting)
        return
    kind = KINDS.get(match["kind"])
    if kind is None:
        raise ParameterError(f"fault {part!r}: {no_kind(match['kind'], (*KINDS, MTBF, REQUEUE))}")
    try:
        values = _values(kind, match)
        for where in _places(kind, match["where"].strip(), setting):
            yield kind(**where, **values)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"fault {part!r}: {error}") from error


def _failures(part: str, match: re.Match[str], setting: Setting) -> tuple[Fault, ...]:
    """Return the failures of machines that a text describes."""
    form = MTBF_FORM.replace(MTBF, match["kind"], 1)
    try:
        if not match["length"] or not match["rest"]:
            raise ParameterError(f"write {form}")
        words = [word.strip() for word in match["rest"].split(",")]
        times, count = units.seconds, units.whole
        readers: tuple[Callable[[str], float], ...] = (times, times, count, times)
        if len(words) > len(readers):
            raise ParameterError(f"write {form}")
        given: list[Any] = [read(word) for read, word in zip(readers, words, strict=False)]
        at_s, for_s = units.seconds(match["at"]), units.seconds(match["length"])
        return _drawn(match["kind"], match["where"], Failures(at_s, for_s, *given), setting)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"fault {part!r}: {error}") from error


def _drawn(kind: str, where: str, failures: Failures, setting: Setting) -> tuple[Fault, ...]:
    """Return the crashes and restarts of the machines that a text names."""
    units = machines(where, setting.ranks, setting.network)
    if kind == REQUEUE and setting.ranks is None:
        raise ParameterError(f"{REQUEUE}: only a run determines which ranks the job has")
    job = range(setting.ranks or 0) if kind == REQUEUE else ()
    return failures.faults(units, setting.seed, job=job)


def _values(kind: type[Fault], match: re.Match[str]) -> dict[str, Any]:
    values: dict[str, Any] = {"at_s": units.seconds(match["at"])}
    names = [part.name for part in fields(kind)]
    if "for_s" in names:
        values["for_s"] = units.seconds(match["length"]) if match["length"] else math.inf
    elif match["length"]:
        raise ParameterError(f"a {kind.kind} has no length")
    own = [name for name in names if name not in _WHERE]
    given = [word.strip() for word in match["rest"].split(",")] if match["rest"] else []
    required = [part.name for part in fields(kind) if part.name in own and part.default is MISSING]
    if not len(required) <= len(given) <= len(own):
        raise ParameterError(f"a {kind.kind} takes {', '.join(own) or 'no parameters'}; {len(given)} given")
    for name, word in zip(own, given, strict=False):
        read = units.seconds if name.endswith("_s") else str if name in _WORDS else units.number
        try:
            values[name] = read(word)
        except ParameterError as error:
            raise ParameterError(f"{name}: {error}") from error
    return values


_WORDS = ("damage",)  # parameters that are texts


def _places(kind: type[Fault], where: str, setting: Setting) -> Iterator[dict[str, Any]]:
    if not issubclass(kind, LinkFault):
        chosen = machines(where, setting.ranks, setting.network)
        ranks = tuple(rank for machine in chosen for rank in machine)
        if issubclass(kind, Partition):
            yield {"members": ranks}
        else:
            yield from ({"rank": rank} for rank in ranks)
        return
    link = re.fullmatch(r"(\d+|\*)\s*(<>|>)\s*(\d+|\*)", where)
    if link is None:
        raise ParameterError(f"{where!r}: a {kind.kind} needs a link, such as 0>1, 2<>* or *>3")
    ends = [None if end == "*" else int(end) for end in (link[1], link[3])]
    yield {"source": ends[0], "dest": ends[1]}
    if link[2] == "<>":
        yield {"source": ends[1], "dest": ends[0]}


def to_text(faults: Iterable[Fault]) -> str:
    """Return the text that `from_text` reads back."""
    return "; ".join(map(_fault_text, faults))


def _fault_text(fault: Fault) -> str:
    values = {part.name: getattr(fault, part.name) for part in fields(type(fault))}
    length = "" if math.isinf(values.get("for_s", math.inf)) else f"+{values['for_s']:.12g}s"
    own = [
        value if name in _WORDS else f"{value:.12g}{'s' * name.endswith('_s')}"
        for name, value in values.items()
        if name not in _WHERE
    ]
    return f"{fault.kind}:{_place_text(fault, values)}@{values['at_s']:.12g}s{length}{''.join(f',{w}' for w in own)}"


def _place_text(fault: Fault, values: dict[str, Any]) -> str:
    if isinstance(fault, LinkFault):
        return ">".join("*" if values[end] is None else str(values[end]) for end in ("source", "dest"))
    return ",".join(map(str, fault.ranks))


def to_json(faults: Iterable[Fault], seed: int) -> str:
    """Return the JSON that `from_json` reads back. A fault that lasts for ever has "for_s": null."""
    return json.dumps({"seed": seed, "faults": [_document(fault) for fault in faults]}, indent=1)


def _document(fault: Fault) -> dict[str, Any]:
    values = {part.name: getattr(fault, part.name) for part in fields(type(fault))}
    if math.isinf(values.get("for_s", 0.0)):
        values["for_s"] = None
    return {"kind": fault.kind, **values}


def read(path: Path) -> str:
    """Return the text of a file."""
    try:
        if path.stat().st_size > MOST_NBYTES:
            raise ParameterError(f"fault plan {path}: it is longer than {MOST_NBYTES:,} bytes")
        return path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"fault plan: cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def from_json(words: str, setting: Setting = Setting()) -> tuple[tuple[Fault, ...], int | None]:  # noqa: B008
    """Return the faults and the seed (None: not given) of a plan in JSON: an object, or the list of its faults."""
    try:
        document = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"fault plan: not valid JSON: {error}") from error
    return _of_document(document, setting)


def from_toml(words: str, setting: Setting = Setting()) -> tuple[tuple[Fault, ...], int | None]:  # noqa: B008
    """Return the faults and the seed of a plan in TOML: `seed`, and one table [[faults]] per fault."""
    try:
        document = tomllib.loads(words)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"fault plan: not valid TOML: {error}") from error
    return _of_document(document, setting)


def _of_document(document: Any, setting: Setting) -> tuple[tuple[Fault, ...], int | None]:
    if isinstance(document, list):
        document = {"faults": document}
    if not isinstance(document, dict):
        document = {}
    seed, entries = document.get("seed"), document.get("faults")
    unknown = set(document) - {"seed", "faults"}
    if (
        unknown
        or not isinstance(entries, list)
        or not (seed is None or (isinstance(seed, int) and seed >= 0))
    ):
        raise ParameterError(
            'fault plan: write {"seed": 0, "faults": [...]} with an integer seed of at least 0'
        )
    if seed is not None:
        setting = setting._replace(seed=seed)
    return tuple(
        fault for number, entry in enumerate(entries) for fault in _entry(number, entry, setting)
    ), seed


def _entry(number: int, entry: Any, setting: Setting) -> Iterator[Fault]:
    known = (*KINDS, MTBF, REQUEUE)
    if not isinstance(entry, dict) or entry.get("kind") not in known:
        shown = repr(entry)[:80]
        raise ParameterError(f'fault {number} is {shown}: write {{"kind": one of {", ".join(known)}, ...}}')
    what = f"fault {number} ({entry['kind']})"
    values = {name: value for name, value in entry.items() if name not in ("kind", "where")}
    if values.get("for_s", 0.0) is None:  # JSON has no infinity
        values["for_s"] = math.inf
    drawn, where = entry["kind"] in (MTBF, REQUEUE), entry.get("where")
    named: Any = Failures if drawn else KINDS[entry["kind"]]
    try:
        if not isinstance(where, (str, type(None))):
            raise ParameterError(f"where is {where!r}: give a text, such as '0-3' or 'node2'")
        if drawn:
            yield from _drawn(entry["kind"], where or "*", Failures(**values), setting)
            return
        for place in [{}] if where is None else _places(named, where.strip(), setting):
            yield named(**place, **values)
    except ValueError as error:
        raise ParameterError(f"{what}: {error}") from error
    except TypeError:
        given = ", ".join(name for name in entry if name != "kind")
        names = ", ".join(part.name for part in fields(named))
        where = "and where" if drawn else "where may take the place of ranks"
        raise ParameterError(f"{what} has {given}: give {names}; {where}") from None


# MPI's connections are reliable because TCP's (or the NIC's) are: data that a link drops are sent again at Linux's
# times. The first retransmission occurs after TCP_RTO_MIN, each further one after twice as long, up to TCP_RTO_MAX;
# after net.ipv4.tcp_retries2 = 15 of them the connection is aborted.
RETRANSMIT_S = 0.2
RETRANSMIT_MOST_S = 120.0
TRIES = 16

_OBJECTS = "FaultPlan((Crash(3, 5.0), …)), or FaultPlan.parse of a text"
_Speeds = tuple[list[float], list[float]]  # ascending times, and the speed from each of them on


@dataclass(frozen=True)
class FaultPlan:
    """Faults and the seed of their random draws. Two equal plans affect every run equally."""

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", _held(self.faults, self.seed))
        for rank, turns in self._lives.items():
            for turn, fault in enumerate(turns):
                if isinstance(fault, Restart) != bool(turn % 2):
                    state = "dead" if turn % 2 else "alive"
                    raise fault.refuse(
                        f"rank {rank} is {state} at {fault.at_s:g} s; crashes and restarts take turns"
                    )
                if turn and isinstance(fault, Crash) and fault.at_s <= turns[turn - 1].at_s:
                    raise fault.refuse(
                        f"rank {rank} begins again at {fault.at_s:g} s: let it crash later than that"
                    )

    @cached_property
    def _lives(self) -> dict[int, list[Crash | Restart]]:
        """The crashes and restarts of each rank, by time."""
        lives: defaultdict[int, list[Crash | Restart]] = defaultdict(list)
        for fault in self.faults:
            if isinstance(fault, (Crash, Restart)):
                lives[fault.rank].append(fault)
        return {rank: sorted(turns, key=lambda fault: fault.at_s) for rank, turns in lives.items()}

    @classmethod
    def parse(
        cls, source: str | FaultPlan | None, *, seed: int = 0, ranks: int | None = None, network: Any = None
    ) -> FaultPlan:
        """Return the plan that a text names: "crash:17@3.5s; pause:3@1s+6s", JSON, or a file (.json, .toml, .csv).

        `ranks` and `network` of the run give "*", "node2" and similar names their meaning.
        """
        if isinstance(source, FaultPlan):
            return source
        if not isinstance(source, (str, type(None))):
            raise ParameterError(f"faults={source!r}: give a text, a file's name, or {_OBJECTS}")
        words, setting = (source or "").strip(), Setting(ranks, network, seed)
        if words.endswith(".csv"):
            return cls(recorded(read(Path(words)), words), seed)
        if not words.endswith((".toml", ".json")):
            return cls._of_words(words, setting)
        text = read(Path(words))
        try:
            return cls._of_words(text, setting, toml=words.endswith(".toml"))
        except ParameterError as error:
            raise ParameterError(f"{words}: {error}") from error

    @classmethod
    def _of_words(cls, words: str, setting: Setting, *, toml: bool = False) -> FaultPlan:
        if toml or words.startswith(("{", "[")):
            faults, own_seed = (from_toml if toml else from_json)(words, setting)
            return cls(faults, setting.seed if own_seed is None else own_seed)
        return cls(from_text(words, setting), setting.seed)

    def to_json(self) -> str:
        """Return the plan as JSON that `parse` reads back."""
        return to_json(self.faults, self.seed)

    def __str__(self) -> str:
        return to_text(self.faults)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def check(self, ranks: int) -> None:
        """Raise ParameterError if a fault names a rank that a run of `ranks` ranks lacks."""
        for fault in self.faults:
            beyond = [rank for rank in fault.ranks if rank >= ranks]
            if beyond:
                raise fault.refuse(f"the run has ranks 0 to {ranks - 1}, and no rank {beyond[0]}")
            if type(fault) is Partition and len(fault.members) == ranks:
                raise fault.refuse(f"all {ranks} ranks are on one side: leave some out of members")

    # ------------------------------------------------------------------------------------------- ranks

    def death_s(self, rank: int, after_s: float = 0.0) -> float:
        """Return when the rank next crashes, at or after `after_s`; inf if it does not."""
        return min(self._times(Crash, rank, after_s), default=math.inf)

    def restart_s(self, rank: int, after_s: float = 0.0) -> float:
        """Return when the rank next starts again, at or after `after_s`; inf if it does not."""
        return min(self._times(Restart, rank, after_s), default=math.inf)

    def _times(self, kind: type[Crash | Restart], rank: int, after_s: float) -> list[float]:
        turns = self._lives.get(rank, ())
        return [fault.at_s for fault in turns if isinstance(fault, kind) and fault.at_s >= after_s]

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """The ranks with pauses or slow-downs; for all other ranks `stretch` and `awake_s` change nothing."""
        return frozenset(self._speeds)

    @cached_property
    def _speeds(self) -> dict[int, _Speeds]:
        """For each disturbed rank: the times of its speed changes, and the new speeds. Overlapping faults multiply."""
        windows: defaultdict[int, list[Pause | SlowDown]] = defaultdict(list)
        for fault in self.faults:
            if isinstance(fault, (Pause, SlowDown)):
                windows[fault.rank].append(fault)
        return {rank: _speeds(faults) for rank, faults in windows.items()}

    def stretch(self, rank: int, start_s: float, duration_s: float) -> float:
        """Return the end of work of `duration_s` that the rank starts at `start_s`; inf if never."""
        # The inverse of the integral of the speed: each stretch of constant speed does some of the work, and a pause
        # is a stretch of speed 0. A block may thus begin before a fault and end after it.
        timeline = self._speeds.get(rank)
        if timeline is None:
            return start_s + duration_s
        times_s, speeds = timeline
        at_s, left_s = start_s, duration_s
        for index in range(bisect_right(times_s, start_s) - 1, len(times_s)):
            end_s = times_s[index + 1] if index + 1 < len(times_s) else math.inf
            done_s = at_s + left_s / speeds[index] if speeds[index] else math.inf
            if done_s <= end_s:
                return done_s
            left_s -= (end_s - at_s) * speeds[index]
            at_s = end_s
        return math.inf

    def speed(self, rank: int, time_s: float) -> tuple[float, float]:
        """Return how fast the rank computes at a time (1: undisturbed), and until when; inf: for ever."""
        times_s, speeds = self._speeds.get(rank, ([0.0], [1.0]))
        index = bisect_right(times_s, time_s) - 1
        return speeds[index], times_s[index + 1] if index + 1 < len(times_s) else math.inf

    def awake_s(self, rank: int, time_s: float) -> float:
        """Return the first time at or after `time_s` at which the rank is not paused."""
        timeline = self._speeds.get(rank)
        if timeline is None:
            return time_s
        times_s, speeds = timeline
        index = bisect_right(times_s, time_s) - 1
        while index < len(times_s) and speeds[index] == 0.0:
            index += 1
            time_s = times_s[index] if index < len(times_s) else math.inf
        return time_s

    @cached_property
    def mortal(self) -> bool:
        return any(isinstance(fault, Crash) for fault in self.faults)

    @cached_property
    def of_machines(self) -> tuple[Pause | SlowDown | Skew, ...]:
        return tuple(fault for fault in self.faults if isinstance(fault, (Pause, SlowDown, Skew)))

    @cached_property
    def restarts(self) -> bool:
        return any(isinstance(fault, Restart) for fault in self.faults)

    @cached_property
    def paused(self) -> frozenset[int]:
        return frozenset(fault.rank for fault in self.faults if isinstance(fault, Pause))

    def paused_s(self, rank: int, time_s: float) -> float:
        """Return the start of the pause that holds the rank at `time_s`; inf if it is not paused."""
        times_s, speeds = self._speeds.get(rank, ([], []))
        index, since_s = bisect_right(times_s, time_s) - 1, math.inf
        while index >= 0 and speeds[index] == 0.0:
            since_s, index = times_s[index], index - 1
        return since_s

    # ------------------------------------------------------------------------------------------- links

    @cached_property
    def links(self) -> tuple[tuple[int, LinkFault | Partition], ...]:
        """The faults of links with their numbers in the plan; empty: every message is delivered normally."""
        return tuple(
            (i, fault) for i, fault in enumerate(self.faults) if isinstance(fault, (LinkFault, Partition))
        )

    def message(self, source: int, dest: int, sent_s: float, *sequence: int) -> Verdict:
        """Return the verdict on message number `sequence` from `source` to `dest`, sent at `sent_s`."""
        verdict = DELIVERED
        for number, fault in self.links:
            if fault.covers(source, dest, sent_s):
                chance = _chance(self.seed, number, source, dest, *sequence)
                verdict = verdict.then(fault.verdict(sent_s, chance))
        return verdict

    def carried(self, source: int, dest: int, sent_s: float, *key: int) -> Verdict:
        """Return the verdict on data on a reliable connection: they are lost only if every attempt is lost.

        `key` distinguishes these data from all other data between the two. The times of the attempts are TCP's on
        Linux.
        """
        # Each attempt is a separate message with its own draw: its number is the last part of the key. A link that is
        # down holds the data until the first attempt after its recovery, not until the recovery itself.
        try_s, wait_s = sent_s, RETRANSMIT_S
        for resent in range(TRIES):
            verdict = self.message(source, dest, try_s, *key, resent)
            if not verdict.lost:
                return verdict._replace(delay_s=verdict.delay_s + (try_s - sent_s), resent=resent)
            try_s, wait_s = try_s + wait_s, min(2 * wait_s, RETRANSMIT_MOST_S)
        return LOST

    def covered(self, source: Ints, dest: Ints, sent_s: Floats) -> Ints:
        """Return the indices of the messages that meet any fault; NaN means never sent."""
        met = np.zeros(len(source), bool)
        for _, fault in self.links:
            during = (fault.at_s <= sent_s) & (sent_s < fault.at_s + fault.for_s)
            if during.any():  # finding the active faults is cheap, and most are inactive
                met |= during & fault.touches(source, dest)
        return np.flatnonzero(met & (source != dest))

    def chance(self, *key: int) -> float:
        """Return a uniform number from [0, 1) that is a function of the plan's seed and the key."""
        return _chance(self.seed, *key)

    def quiet(self, begin_s: float, end_s: float) -> bool:
        return all(fault.at_s > end_s or fault.at_s + fault.for_s <= begin_s for _, fault in self.links)


def _held(faults: Any, seed: Any) -> tuple[Fault, ...]:
    """Return the faults of a plan, if they are valid."""
    if not isinstance(faults, Iterable) or isinstance(faults, str):
        raise ParameterError(f"a fault plan of {faults!r}: write {_OBJECTS}")
    held = tuple(faults)
    for each in held:
        if not isinstance(each, Fault):
            raise ParameterError(f"a fault plan with {each!r}: write {_OBJECTS}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ParameterError(f"a fault plan of seed {seed!r}: give an integer of at least 0")
    return held


def _speeds(faults: list[Pause | SlowDown]) -> _Speeds:
    edges = {0.0} | {edge for fault in faults for edge in (fault.at_s, fault.at_s + fault.for_s)}
    times_s = sorted(edge for edge in edges if edge < math.inf)
    speeds = []
    for time_s in times_s:
        active = [fault.speed for fault in faults if fault.at_s <= time_s < fault.at_s + fault.for_s]
        speeds.append(math.prod(active))
    return times_s, speeds


def _chance(*key: int) -> float:
    # A hash and not a stream: a stream would give each query the next number, so an additional message, or another
    # order of ranks, would change all later verdicts. A float holds 53 of the 64 bits.
    words = b"".join(number.to_bytes(max(8, number.bit_length() + 7 >> 3), "little") for number in key)
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) * 2.0**-53
