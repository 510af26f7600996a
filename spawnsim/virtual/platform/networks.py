"""Networks and links in TOML.

This room knows which keys describe which network. It must not know what messages cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from spawnsim import random
from spawnsim.virtual.network import (
    Contention,
    Dragonfly,
    FatTree,
    Hockney,
    HomeLinks,
    Link,
    LogGP,
    Network,
    Nodes,
    Piecewise,
    Regions,
    Switch,
    Torus,
)
from spawnsim.virtual.platform.reading import Section


def network(section: Section) -> Network:
    """Return the network that a `[network]` table describes."""
    topology = section.choice("topology", tuple(TOPOLOGIES))
    overheads: dict[str, Any] = {
        "call_overhead_s": section.seconds("call_overhead", 1e-6),
        "eager_bytes": section.nbytes("eager", 65536),
        "contention": section.choice("contention", get_args(Contention), "serial"),
        "gamma_s_per_B": 1.0 / section.bytes_per_second("reduction") if section.has("reduction") else 0.0,
    }
    section.asked.add("reduction")
    built = TOPOLOGIES[topology](section, overheads)
    section.close()
    return built


def link(section: Section) -> Link:
    """Return the link that a table describes."""
    built = LINKS[section.choice("model", tuple(LINKS), "hockney")](section)
    section.close()
    return built


def _hockney(section: Section) -> Link:
    return section.build(
        Hockney, latency_s=section.seconds("latency"), bandwidth_Bps=section.bytes_per_second("bandwidth")
    )


def _loggp(section: Section) -> Link:
    names = {"L": "latency", "o": "overhead", "g": "gap"}
    symbols = {symbol: section.seconds(key) for symbol, key in names.items()}
    return section.build(LogGP, G=1.0 / section.bytes_per_second("bandwidth"), **symbols)


def _piecewise(section: Section) -> Link:
    steps = [(step.nbytes("from"), link(step)) for step in section.sections("steps")]
    return section.build(Piecewise, steps=tuple(steps))


LINKS: dict[str, Callable[[Section], Link]] = {"hockney": _hockney, "loggp": _loggp, "piecewise": _piecewise}


def _switch(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(Switch, link=link(section.section("link")), **overheads)


def _nodes(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        Nodes,
        intra=link(section.section("intra")),
        inter=link(section.section("inter")),
        ranks_per_node=section.integer("ranks_per_node"),
        nodes=section.integer("nodes") if section.has("nodes") else None,
        **overheads,
    )


def _fat_tree(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        FatTree,
        link=link(section.section("link")),
        radices=section.integers("radices"),
        hop_latency_s=section.seconds("hop_latency", 0.0),
        oversubscription=section.number("oversubscription", 1.0),
        **overheads,
    )


def _torus(section: Section, overheads: dict[str, Any]) -> Network:
    section.asked.add("intra")
    return section.build(
        Torus,
        link=link(section.section("link")),
        shape=section.integers("shape"),
        hop_latency_s=section.seconds("hop_latency", 0.0),
        ranks_per_node=section.integer("ranks_per_node", 1),
        intra=link(section.section("intra")) if section.has("intra") else None,
        **overheads,
    )


def _dragonfly(section: Section, overheads: dict[str, Any]) -> Network:
    return section.build(
        Dragonfly,
        link=link(section.section("link")),
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
    joins = tuple(tuple(map(Hockney, *pair)) for pair in zip(latencies, bandwidths, strict=True))
    return section.build(Regions, members=members, joins=joins, **overheads)


def _home(section: Section, overheads: dict[str, Any]) -> Network:
    """Home lines: up, down and latency are medians; `spread` is the lognormal shape of the ranks around them."""
    ranks, spread = section.integer("ranks", 16384), section.number("spread", 0.0)
    draws = random.generator(section.integer("seed", 0, least=0), -1, "platform.home").standard_normal(
        (ranks, 3)
    )
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
