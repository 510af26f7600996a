"""Platform files: TOML to `Platform`, the presets that come with the package, and how a platform is named.

    description = "One sentence"
    progress = "poll"                  # or "async", "hardware"

    [network]
    topology = "switch"                # or "nodes", …
    eager = "64 KiB"
    call_overhead = "1 us"
    reduction = "4 GB/s"               # how fast a reduction adds; left out: no time at all
    [network.link]
    latency = "25 us"
    bandwidth = "10 Gbit/s"

    [collectives]
    library = "mpich"                  # whose thresholds choose the algorithm; or "openmpi"
    allreduce = "ring"                 # a fixed choice

    [compute]
    step = "10 ms"                     # of a comm.compute() that states nothing
    stragglers = "lognormal:0.1"       # unless the run names its own

This room knows the keys. It must not know what the values do.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.options import nearest
from spawnsim.virtual.collectives import Selection
from spawnsim.virtual.compute import Fixed, parse_stragglers
from spawnsim.virtual.network import Network
from spawnsim.virtual.platform import networks
from spawnsim.virtual.platform.model import PROGRESS, Platform
from spawnsim.virtual.platform.reading import Section

DEFAULT = "ethernet-10g"


def load_platform(source: str | Path | Platform | Network | None = None) -> Platform:
    """Return a platform: a preset's name, a TOML file, a network (with no compute step), or None for the default.

    Raises:
        ParameterError: No such preset or file, or a value in the file that cannot be (with file, line and key).
    """
    if isinstance(source, Platform):
        return source
    if source is None or isinstance(source, (str, Path)):
        return _named(str(source or DEFAULT))
    if isinstance(source, Network):
        return Platform(type(source).__name__.lower(), source)
    raise ParameterError(f"platform {source!r}: give a name, a TOML file, a Platform or a Network")


def list_platforms() -> tuple[Platform, ...]:
    """Return the presets, by name."""
    return tuple(_named(name) for name in _presets())


def _named(name: str) -> Platform:
    presets = _presets()
    if name in presets:
        return parse(Section.of_text(presets[name], f"{name}.toml"), name)
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return parse(Section.of_file(path), path.stem)
    hint = nearest(name, presets)
    raise ParameterError(
        f"no platform {name!r}: {hint and hint + ' '}give a TOML file, or one of {', '.join(presets)}"
    )


def _presets() -> dict[str, str]:
    """Return the text of each preset by its name."""
    folder = resources.files("spawnsim.virtual.platform") / "presets"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in files
        if file.name.endswith(".toml")
    }


def parse(top: Section, name: str) -> Platform:
    """Return the platform of a file; `name` is what it is called if it does not say."""
    compute = top.section("compute")
    progress = top.choice("progress", PROGRESS, "poll")
    platform = Platform(
        name=top.string("name", name),
        network=networks.network(top.section("network")),
        step=Fixed(compute.seconds("step")) if compute.has("step") else None,
        stragglers=compute.get("stragglers", parse_stragglers, ()),
        progress=next(known for known in PROGRESS if known == progress),
        collectives=_selection(top.section("collectives")),
        description=top.string("description", ""),
        fitted=_facts(top.section("fitted")),
    )
    compute.asked.add("step")
    compute.close()
    top.close()
    return platform


def _selection(section: Section) -> Selection:
    def library(value: object) -> str:
        return Selection(library=str(value)).library

    def pair(operation: str) -> tuple[str, str]:
        return section.get(operation, lambda value: Selection(fixed=((operation, str(value)),)).fixed[0])

    settings: dict[str, Any] = {"library": section.get("library", library, "mpich")}
    if section.has("segment"):
        settings["segment_bytes"] = section.nbytes("segment")
    fixed = tuple(pair(key) for key in section.values if key not in ("library", "segment"))
    return section.build(Selection, fixed=fixed, **settings)


def _facts(section: Section) -> tuple[tuple[str, str], ...]:
    return tuple((key, section.string(key)) for key in section.values)
