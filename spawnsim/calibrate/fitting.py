"""From measurements to a platform. Every other size is left out of the fit, and judges it.

This room knows measurements and the parts of a platform. It must not know communicators.
"""

from __future__ import annotations

from collections.abc import Sequence

from spawnsim.calibrate.algorithms import fit_gamma, fit_selection
from spawnsim.calibrate.links import fit_link
from spawnsim.calibrate.measuring import Measured
from spawnsim.calibrate.sampling import Point, held_out
from spawnsim.calibrate.stragglers import fit_stragglers
from spawnsim.virtual.compute import Fixed
from spawnsim.virtual.network import Fabric, Nodes, Switch
from spawnsim.virtual.platform import Platform

LEAST_OVERHEAD_S = 1e-8  # an observation must cost something, or polling would not move time on


def fit(measured: Measured, name: str = "measured") -> Platform:
    """Return the platform that explains the measurements."""
    network = _network(measured)
    collectives = [
        point for point in _kept(measured.points) if point.operation not in ("p2p", "stream", "post", "get")
    ]
    network = fit_gamma(network, collectives, measured.ranks)
    steps = fit_stragglers(measured.steps_s, same_ranks=False)
    facts = dict(measured.facts)
    return Platform(
        name=name,
        network=network,
        step=Fixed(steps.step_s),
        stragglers=steps.stragglers,
        progress="hardware" if measured.answers_busy else "poll",
        collectives=fit_selection(network, collectives, measured.ranks),
        description=f"measured on {facts['ranks']} ranks, {facts['library']}, {facts['cores']} cores a node",
        fitted=measured.facts,
    )


def _kept(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if not held_out(point.nbytes)]


def _network(measured: Measured) -> Fabric:
    probe = next(point for point in measured.points if point.operation == "probe")
    near = fit_link(_kept(measured.points), eager_nbytes=measured.eager_nbytes)
    common = {
        "call_overhead_s": max(probe.seconds, LEAST_OVERHEAD_S),
        "eager_bytes": measured.eager_nbytes,
    }
    if not measured.apart:
        return Switch(near, **common)  # type: ignore[arg-type]
    apart = fit_link(_kept(measured.apart), eager_nbytes=measured.eager_nbytes)
    return Nodes(near, apart, ranks_per_node=measured.ranks_per_node, **common)  # type: ignore[arg-type]
