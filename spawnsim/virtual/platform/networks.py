"""Networks and links in TOML.

This room knows which keys describe which network. It must not know what messages cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.virtual.network import Hockney, Link, LogGP, Network, Nodes, Piecewise, Switch
from spawnsim.virtual.platform.reading import Section


def network(section: Section) -> Network:
    """Return the network that a `[network]` table describes."""
    topology = section.choice("topology", tuple(TOPOLOGIES))
    overheads: dict[str, Any] = {
        "call_overhead_s": section.seconds("call_overhead", 1e-6),
        "eager_bytes": section.nbytes("eager", 65536),
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


TOPOLOGIES: dict[str, Callable[[Section, dict[str, Any]], Network]] = {"switch": _switch, "nodes": _nodes}
