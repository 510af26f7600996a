"""Fault plans in words and in JSON.

    crash:17@3.5s               restart:17@9s              pause:3@1s+6s            slow:4@1s+10s,3
    down:0>1@2s+1s              drop:*>3@0s+5s,0.1         delay:2<>*@1s+2s,5ms,1ms
    duplicate:0>1@0s,0.5        corrupt:0>1@0s,0.01        partition:0-3,8@5s+2s

KIND:WHERE@START[+LENGTH][,PARAMETERS], joined by ";". WHERE is ranks ("3", "0-3,8") or a link ("0>1", "2<>*" for both
ways, "*" for any rank). Without LENGTH a fault lasts for ever.

This room knows the two notations. It must not know what the faults do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.errors import ParameterError
from spawnsim.virtual.faults.events import KINDS, Fault, LinkFault, Partition

_PART = re.compile(r"(?P<kind>[a-z]+):(?P<where>[^@]+)@(?P<at>[^+,]+)(\+(?P<length>[^,]+))?(,(?P<rest>.*))?")
_WHERE = ("rank", "members", "source", "dest", "at_s", "for_s")
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


def from_text(words: str) -> tuple[Fault, ...]:
    """Return the faults that a text names."""
    parts = [part.strip() for part in words.split(";")]
    return tuple(fault for part in parts if part for fault in _faults(part))


def _faults(part: str) -> Iterator[Fault]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ParameterError(f"fault {part!r}: write {FORM}")
    kind = KINDS.get(match["kind"])
    if kind is None:
        raise ParameterError(f"fault {part!r}: no kind {match['kind']!r}. Kinds: {', '.join(KINDS)}")
    try:
        values = _values(kind, match)
        for where in _places(kind, match["where"].strip()):
            yield kind(**where, **values)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"fault {part!r}: {error}") from error


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
        values[name] = units.seconds(word) if name.endswith("_s") else float(word)
    return values


def _places(kind: type[Fault], where: str) -> Iterator[dict[str, Any]]:
    if not issubclass(kind, LinkFault):
        ranks = tuple(_ranks(where))
        yield from [{"members": ranks}] if kind is Partition else [{"rank": rank} for rank in ranks]
        return
    source, arrow, dest = re.fullmatch(r"([^<>]*?)\s*(<>|>|)\s*([^<>]*)", where).groups()  # type: ignore[union-attr]
    if not arrow:
        raise ParameterError(f"a {kind.kind} needs a link, such as 0>1, 2<>* or *>3")
    ends = [None if end == "*" else int(end) for end in (source, dest)]
    yield {"source": ends[0], "dest": ends[1]}
    if arrow == "<>":
        yield {"source": ends[1], "dest": ends[0]}


def _ranks(where: str) -> Iterator[int]:
    for word in where.split(","):
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def to_text(faults: Iterable[Fault]) -> str:
    """Return the text that `from_text` reads back."""
    return "; ".join(map(_word, faults))


def _word(fault: Fault) -> str:
    values = {part.name: getattr(fault, part.name) for part in fields(type(fault))}
    length = "" if math.isinf(values.get("for_s", math.inf)) else f"+{values['for_s']:.12g}s"
    own = [f"{value:.12g}{'s' * name.endswith('_s')}" for name, value in values.items() if name not in _WHERE]
    return (
        f"{fault.kind}:{_place(fault, values)}@{values['at_s']:.12g}s{length}{''.join(f',{w}' for w in own)}"
    )


def _place(fault: Fault, values: dict[str, Any]) -> str:
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
    """Return the text of a JSON file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"fault plan {path}: {error}") from error


def from_json(words: str) -> tuple[tuple[Fault, ...], int | None]:
    """Return the faults and the seed (None: not given) of a plan in JSON: an object, or the list of its faults."""
    try:
        document = json.loads(words)
    except ValueError as error:
        raise ParameterError(f"fault plan: no valid JSON: {error}") from error
    if isinstance(document, list):
        document = {"faults": document}
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
    return tuple(_entry(number, entry) for number, entry in enumerate(entries)), seed


def _entry(number: int, entry: Any) -> Fault:
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        raise ParameterError(f'fault {number} is {entry!r}: write {{"kind": one of {", ".join(KINDS)}, ...}}')
    kind = KINDS[entry["kind"]]
    values = {name: value for name, value in entry.items() if name != "kind"}
    for name, value in values.items():
        values[name] = _value(f"fault {number} ({kind.kind}): {name}", name, value)
    try:
        return kind(**values)
    except TypeError:
        names = ", ".join(part.name for part in fields(kind))
        raise ParameterError(f"fault {number} ({kind.kind}) has {', '.join(values)}: give {names}") from None


def _value(what: str, name: str, value: Any) -> Any:
    """Return a JSON value as its field wants it."""
    if value is None:
        return math.inf if name == "for_s" else None
    if name == "members":
        return (
            tuple(_value(what, "rank", rank) for rank in value)
            if isinstance(value, list)
            else _refuse(what, value)
        )
    integer = name in ("rank", "source", "dest")
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        _refuse(what, value)
    return value


def _refuse(what: str, value: Any) -> Any:
    raise ParameterError(f"{what} is {value!r}: give numbers (ranks: integers; members: a list of ranks)")
