"""Platforms, and platform files: TOML to `Platform` and back, the presets of the package, and the names of platforms.

    description = "One sentence"
    progress = "poll"                  # or "async", "hardware"

    [network]
    topology = "switch"                # or "nodes", …
    eager = "64 KiB"
    collective_rendezvous = true       # longer messages of collectives ask the receiver first, too; default: false
    call_overhead = "1 us"
    reduction = "4 GB/s"               # speed of additions in a reduction; default: no time at all
    reduction_beyond = ["32 MiB", "3 GB/s"]  # of operands from this size on, which exceed the caches
                                       # or by dtype: reduction = { default = "4 GB/s", bfloat16 = "2 GB/s" }
    copy = "20 GB/s"                   # speed of copying a rank's own block in a collective; default: no time at all
    [network.link]
    latency = "25 us"
    bandwidth = "10 Gbit/s"
    background = "poisson:3,400ms"     # background traffic; `trace` has a recorded bandwidth

    [network.window]                   # accesses to windows within a node that ranks map; default: messages
    latency = "1 us"
    bandwidth = "8 GB/s"

    [collectives]
    library = "mpich"                  # the library whose thresholds choose the algorithm; or "openmpi", "gloo", "nccl"
    allreduce = "ring"                 # a fixed choice
    [collectives.nccl]                 # the machine as NCCL sees it: see `platform.collectives`
    bus = "96 GB/s"

    [storage]
    latency = "1 ms"                   # of writing or reading a checkpoint
    bandwidth = "1 GB/s"               # of each rank

    [compute]
    step = "10 ms"                     # duration of a comm.compute() without a stated duration
    stragglers = "lognormal:0.1"       # unless the run names its own
    cores = 2                          # per node, shared by its ranks; default: one core per rank
    ranks_per_node = 4                 # if the topology does not define it

    [device]                           # the divisors of `--compute counted`
    operations = "362 TFLOP/s"         # of floating-point numbers
    memory = "864 GB/s"

An unknown key is an error that names the file and the line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from spawnsim import random, units
from spawnsim.columns import MOST_RANKS
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import ComputeModel, Fixed, Straggler, Trace, parse_base, parse_stragglers
from spawnsim.models.network import (
    Contention,
    Dragonfly,
    FatTree,
    Hockney,
    HomeLinks,
    Link,
    Network,
    Nodes,
    Regions,
    Switch,
    Tcp,
    Torus,
)
from spawnsim.models.platform.collectives import read_selection, selection_lines
from spawnsim.models.platform.links import (
    changing,
    link_lines,
    quoted,
    read_link,
    seconds_text,
    speed_text,
    tcp_options,
)
from spawnsim.models.platform.reading import Section
from spawnsim.options import nearest

Progress = Literal["poll", "async", "hardware"]
PROGRESS: tuple[Progress, ...] = ("poll", "async", "hardware")


@dataclass(frozen=True)
class Storage:
    """The cost of a checkpoint: each rank writes and reads its own at `bandwidth_Bps`, after `latency_s` seconds."""

    latency_s: float = 1e-3
    bandwidth_Bps: float = 1e9  # noqa: N815  a unit

    def __post_init__(self) -> None:
        if not 0.0 <= self.latency_s < math.inf or not self.bandwidth_Bps > 0.0:
            raise ParameterError(f"{self}: give a latency of at least 0 s, and a bandwidth above 0 B/s")

    def seconds(self, nbytes: int) -> float:
        """Return the time to write or read `nbytes` bytes."""
        return self.latency_s + nbytes / self.bandwidth_Bps


@dataclass(frozen=True)
class Cores:
    """The cores of a node for its ranks: `count` cores; `ranks_per_node`: None for the topology's number."""

    count: int
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or not (self.ranks_per_node is None or self.ranks_per_node >= 1):
            raise ParameterError(f"{self}: give at least one core and one rank")


@dataclass(frozen=True)
class Platform:
    """A cluster as seen by virtual ranks.

    Attributes:
        name: for captions and manifests.
        network: the costs of messages, by pair of ranks.
        step: duration of a `comm.compute()` without a stated duration; None: such a block is an error.
        stragglers: stretch compute blocks, unless the run names its own.
        progress: when a computing rank answers one-sided accesses: "poll" when it next enters MPI, "async" at once by
            its own thread, "hardware" at once by the NIC.
        collectives: the choice of algorithms.
        storage: the cost of a checkpoint.
        description: one sentence.
        device: floating-point operations and bytes per second, for runs that count torch's operations.
        cores: cores that the ranks of a node share when they compute; None: each has a core.
        fitted: the conditions of its measurement, as (name, value) pairs; empty if it was not measured.
    """

    name: str
    network: Network
    step: Fixed | Trace | None = None
    stragglers: tuple[Straggler, ...] = ()
    progress: Progress = "poll"
    collectives: Selection = field(default_factory=Selection)
    storage: Storage = field(default_factory=Storage)
    description: str = ""
    fitted: tuple[tuple[str, str], ...] = ()
    device: tuple[float, float] | None = None
    cores: Cores | None = None

    def __post_init__(self) -> None:
        if self.progress not in PROGRESS:
            raise ParameterError(f"progress={self.progress!r}: give one of {', '.join(PROGRESS)}")

    @property
    def eager_bytes(self) -> int:
        """Longest message that leaves without asking the receiver."""
        return self.network.eager_bytes

    @property
    def call_overhead_s(self) -> float:
        """Seconds that an observation costs."""
        return self.network.call_overhead_s

    def compute_model(
        self,
        compute: str | float | Fixed | Trace | None = None,
        stragglers: str | Straggler | Sequence[Straggler] | None = None,
    ) -> ComputeModel:
        """Return the compute model of a run here; the run's settings take precedence over the platform's."""
        return ComputeModel(
            self.step if compute is None else parse_base(compute),
            self.stragglers if stragglers is None else parse_stragglers(stragglers),
        )

    def places(self, ranks: int) -> list[int]:
        """Return the node on whose cores each rank computes."""
        each = self.cores and self.cores.ranks_per_node
        world = np.arange(ranks)
        found: list[int] = (world // each if each else self.network.place(world)).tolist()
        return found

    def crowded(self, ranks: int) -> bool:
        """Return whether ranks share cores: whether a node has more ranks than cores."""
        return (
            self.cores is not None and max(Counter(self.places(ranks)).values(), default=0) > self.cores.count
        )

    def check(self, ranks: int) -> None:
        """Raise ParameterError if `ranks` ranks do not fit."""
        self.network.check(ranks)


def read_network(section: Section) -> Network:
    """Return the network that a `[network]` table describes."""
    topology = section.choice("topology", tuple(TOPOLOGIES))
    overheads: dict[str, Any] = {
        "call_overhead_s": section.seconds("call_overhead", 1e-6),
        "eager_bytes": section.nbytes("eager", 65536),
        "contention": section.choice("contention", get_args(Contention), "serial"),
        "collective_rendezvous": section.flag("collective_rendezvous", False),
        "gamma_beyond": section.get("reduction_beyond", _beyond) if section.has("reduction_beyond") else None,
        "copy_s_per_B": 1.0 / section.bytes_per_second("copy") if section.has("copy") else 0.0,
        **_reductions(section),
    }
    if section.has("window"):
        overheads["window"] = read_link(section.section("window"))
    # Also if they are omitted: the error about an unknown key lists them as known keys.
    section.asked.update(("reduction", "reduction_beyond", "copy", "window"))
    built = TOPOLOGIES[topology](section, overheads)
    section.close()
    return built


def _reductions(section: Section) -> dict[str, Any]:
    """Return the speed of reductions, and of those of dtypes with a speed of their own."""
    if not isinstance(section.values.get("reduction"), dict):
        return {"gamma_s_per_B": 1.0 / section.bytes_per_second("reduction", math.inf)}
    table = section.section("reduction")
    gammas = {name: 1.0 / table.bytes_per_second(name) for name in ("default", *table.values)}
    return {"gamma_s_per_B": gammas.pop("default"), "gamma_of": tuple(gammas.items())}


def _beyond(value: Any) -> tuple[int, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ParameterError(f'{value!r}: write a size and a speed, such as ["32 MiB", "3 GB/s"]')
    size, speed = map(str, value)
    return int(units.nbytes(size)), 1.0 / units.bytes_per_second(speed)


def _switch(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(Switch, link=read_link(section.section("link")), **overheads)


def _nodes(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        Nodes,
        intra=read_link(section.section("intra")),
        inter=read_link(section.section("inter")),
        ranks_per_node=section.integer("ranks_per_node"),
        nodes=section.integer("nodes") if section.has("nodes") else None,
        **overheads,
    )


def _fat_tree(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        FatTree,
        link=read_link(section.section("link")),
        radices=section.integers("radices"),
        hop_latency_s=section.seconds("hop_latency", 0.0),
        oversubscription=section.number("oversubscription", 1.0),
        **overheads,
    )


def _torus(section: Section, overheads: dict[str, Any]) -> Network:
    section.asked.add("intra")
    return section.build(
        Torus,
        link=read_link(section.section("link")),
        shape=section.integers("shape"),
        hop_latency_s=section.seconds("hop_latency", 0.0),
        ranks_per_node=section.integer("ranks_per_node", 1),
        intra=read_link(section.section("intra")) if section.has("intra") else None,
        **overheads,
    )


def _dragonfly(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        Dragonfly,
        link=read_link(section.section("link")),
        ranks_per_router=section.integer("ranks_per_router"),
        routers_per_group=section.integer("routers_per_group"),
        groups=section.integer("groups"),
        local_latency_s=section.seconds("local_latency", 0.0),
        global_latency_s=section.seconds("global_latency", 0.0),
        global_share=section.number("global_share", 1.0),
        **overheads,
    )


def _regions(section: Section, overheads: dict[str, Any]) -> Network:
    """Tables of latencies and bandwidths, from region (row) to region (column)."""
    members = section.integers("members")
    latencies = section.table("latency", Section.seconds)
    bandwidths = section.table("bandwidth", Section.bytes_per_second)
    shape = [len(members)] * len(members)
    for key, rows in (("latency", latencies), ("bandwidth", bandwidths)):
        if [len(row) for row in rows] != shape:
            raise section.error(
                key, f"{len(members)} regions need {len(members)} rows of {len(members)} values"
            )
    joins: list[list[Link]] = [[*map(Hockney, *pair)] for pair in zip(latencies, bandwidths, strict=True)]
    section.asked.update(("tcp", "changes"))
    if section.has("tcp"):  # connections between regions; within a region the link stays unchanged
        table = section.section("tcp")
        options = tcp_options(table)
        table.close()
        for row, (alphas, rates) in enumerate(zip(latencies, bandwidths, strict=True)):
            for column in (column for column in range(len(members)) if column != row):
                joins[row][column] = table.build(
                    Tcp, latency_s=alphas[column], bandwidth_Bps=rates[column], **options
                )
    for table in section.sections("changes") if section.has("changes") else ():
        places = table.get("between", lambda value: _pair(value, len(members)))
        for row, column in {places, places[::-1]}:
            joins[row][column] = changing(table, joins[row][column])
        table.close()
    return section.build(Regions, members=members, joins=tuple(map(tuple, joins)), **overheads)


def _pair(value: Any, regions: int) -> tuple[int, int]:
    fits = isinstance(value, list) and len(value) == 2
    if not fits or not all(isinstance(each, int) and 0 <= each < regions for each in value):
        raise ParameterError(f"{value!r}: write two regions, from 0 to {regions - 1}, such as [0, 1]")
    return value[0], value[1]


def _home(section: Section, overheads: dict[str, Any]) -> Network:
    """Home lines: up, down and latency are medians; `spread` is the lognormal shape of the ranks' values."""
    # All lines of the file are drawn at once and ranks take them in order: a run of few ranks has the first of the
    # same lines as a run of many.
    ranks, spread = section.integer("ranks", 16384, most=MOST_RANKS), section.number("spread", 0.0)
    draws = random.generator(section.seed(), -1, "platform.home").standard_normal((ranks, 3))
    factors = np.exp(spread * draws)
    medians = (section.seconds("latency"), section.bytes_per_second("up"), section.bytes_per_second("down"))
    latency_s, up, down = (tuple((median * factors[:, i]).tolist()) for i, median in enumerate(medians))
    return section.build(HomeLinks, latency_s=latency_s, up_Bps=up, down_Bps=down, **overheads)


TOPOLOGIES: dict[str, Callable[[Section, dict[str, Any]], Network]] = {
    "switch": _switch,
    "nodes": _nodes,
    "fat-tree": _fat_tree,
    "torus": _torus,
    "dragonfly": _dragonfly,
    "regions": _regions,
    "home": _home,
}


DEFAULT = "ethernet-10g"


def load_platform(source: str | Path | Platform | Network | None = None) -> Platform:
    """Return a platform: a preset's name, a TOML file, a network (with no compute step), or None for the default.

    Raises:
        ParameterError: No such preset or file, or an invalid value in the file (with file, line and key).
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
        return read_platform(Section.of_text(presets[name], f"{name}.toml"), name)
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return read_platform(Section.of_file(path), path.stem)
    hint = nearest(name, presets)
    raise ParameterError(
        f"no platform {name!r}: {hint and hint + ' '}give a TOML file, or one of {', '.join(presets)}"
    )


def _presets() -> dict[str, str]:
    """Return the text of each preset by its name."""
    folder = resources.files("spawnsim.models.platform") / "presets"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in files
        if file.name.endswith(".toml")
    }


def read_platform(top: Section, name: str) -> Platform:
    """Return the platform of a file; `name` is its name if the file gives no name."""
    compute = top.section("compute")
    progress = top.choice("progress", PROGRESS, "poll")
    platform = Platform(
        name=top.string("name", name),
        network=read_network(top.section("network")),
        step=Fixed(compute.seconds("step")) if compute.has("step") else None,
        stragglers=compute.get("stragglers", parse_stragglers, ()),
        progress=next(known for known in PROGRESS if known == progress),
        collectives=read_selection(top.section("collectives")),
        storage=_storage(top.section("storage")),
        description=top.string("description", ""),
        fitted=_facts(top.section("fitted")),
        device=_device(top.section("device")) if top.has("device") else None,
        cores=_cores(compute),
    )
    top.asked.add("device")
    compute.asked.add("step")
    compute.close()
    top.close()
    return platform


def _cores(section: Section) -> Cores | None:
    section.asked.update(("cores", "ranks_per_node"))
    if not section.has("cores"):
        if section.has("ranks_per_node"):
            raise section.error("ranks_per_node", "say how many cores they share")
        return None
    return Cores(
        section.integer("cores"),
        section.integer("ranks_per_node") if section.has("ranks_per_node") else None,
    )


def _device(section: Section) -> tuple[float, float]:
    found = section.above("operations", units.flop_per_second), section.bytes_per_second("memory")
    section.close()
    return found


def _storage(section: Section) -> Storage:
    usual = Storage()
    latency_s = section.seconds("latency", usual.latency_s)
    given = section.has("bandwidth")
    bandwidth = section.bytes_per_second("bandwidth") if given else usual.bandwidth_Bps
    section.asked.add("bandwidth")
    section.close()
    return section.build(Storage, latency_s=latency_s, bandwidth_Bps=bandwidth)


def _facts(section: Section) -> tuple[tuple[str, str], ...]:
    return tuple((key, section.string(key)) for key in section.values)


def to_toml(platform: Platform, comments: Iterable[str] = ()) -> str:
    """Return the text that `load_platform` reads back as this platform, after comment lines.

    Raises:
        UnsupportedError: A network or step that TOML cannot describe yet.
    """
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines += [f"name = {quoted(platform.name)}", f"description = {quoted(platform.description)}"]
    lines += [
        f"progress = {quoted(platform.progress)}",
        "",
        *_network_lines(platform.network),
        "",
        *selection_lines(platform.collectives),
    ]
    if platform.storage != Storage():
        lines += ["", "[storage]", f"latency = {quoted(seconds_text(platform.storage.latency_s))}"]
        lines += [f"bandwidth = {quoted(speed_text(platform.storage.bandwidth_Bps))}"]
    lines += ["", "[compute]"]
    lines += [] if platform.step is None else [f"step = {quoted(seconds_text(_step_s(platform)))}"]
    if platform.stragglers:
        lines.append(f"stragglers = {quoted('+'.join(map(str, platform.stragglers)))}")
    if platform.cores:
        lines.append(f"cores = {platform.cores.count}")
        each = platform.cores.ranks_per_node
        lines += [] if each is None else [f"ranks_per_node = {each}"]
    if platform.device:
        operations, memory = platform.device
        lines += [
            "",
            "[device]",
            f'operations = "{operations / 1e9:.12g} GFLOP/s"',
            f'memory = "{memory / 1e9:.12g} GB/s"',
        ]
    if platform.fitted:
        lines += ["", "[fitted]", *(f"{key} = {quoted(value)}" for key, value in platform.fitted)]
    return "\n".join(lines) + "\n"


def _step_s(platform: Platform) -> float:
    duration_s = getattr(platform.step, "duration_s", None)
    if duration_s is None:
        raise UnsupportedError(
            "a platform file holds a step of fixed length; name a trace with --compute instead"
        )
    return float(duration_s)


def _network_lines(network: Network) -> Iterator[str]:
    yield "[network]"
    written = {Nodes: "nodes", Regions: "regions"}.get(type(network), "switch")
    yield f"topology = {quoted(written)}"
    yield f"call_overhead = {quoted(seconds_text(network.call_overhead_s))}"
    yield f"eager = {quoted(f'{network.eager_bytes} B')}"
    if network.contention != "serial":
        yield f"contention = {quoted(network.contention)}"
    if network.collective_rendezvous:
        yield "collective_rendezvous = true"
    if network.gamma_s_per_B:
        default = quoted(speed_text(1.0 / network.gamma_s_per_B))
        own = "".join(f", {name} = {quoted(speed_text(1.0 / gamma))}" for name, gamma in network.gamma_of)
        yield f"reduction = {{ default = {default}{own} }}" if own else f"reduction = {default}"
    if network.gamma_beyond is not None:
        from_bytes, gamma = network.gamma_beyond
        yield f"reduction_beyond = [{quoted(f'{from_bytes} B')}, {quoted(speed_text(1.0 / gamma))}]"
    if network.copy_s_per_B:
        yield f"copy = {quoted(speed_text(1.0 / network.copy_s_per_B))}"
    window = getattr(network, "window", None)
    yield from () if window is None else link_lines("network.window", window)
    if isinstance(network, Switch):
        yield from link_lines("network.link", network.link)
    elif isinstance(network, Nodes):
        yield f"ranks_per_node = {network.ranks_per_node}"
        if network.nodes is not None:
            yield f"nodes = {network.nodes}"
        yield from link_lines("network.intra", network.intra)
        yield from link_lines("network.inter", network.inter)
    elif isinstance(network, Regions):
        yield from _region_lines(network)
    else:
        raise UnsupportedError(f"a {type(network).__name__} network cannot be written to a platform file yet")


def _region_lines(network: Regions) -> Iterator[str]:
    joins = [[link for link in row if isinstance(link, Hockney)] for row in network.joins]
    if sum(map(len, joins)) < len(network.links()):
        raise UnsupportedError("regions are written to a platform file with Hockney links alone")
    yield f"members = {list(network.members)}"
    tables = {
        "latency": [[seconds_text(link.latency_s) for link in row] for row in joins],
        "bandwidth": [[speed_text(link.bandwidth_Bps) for link in row] for row in joins],
    }
    for key, rows in tables.items():
        yield f"{key} = ["
        yield from (f"    [{', '.join(map(quoted, row))}]," for row in rows)
        yield "]"
