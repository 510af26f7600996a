"""The choice of collective algorithms in platform files: TOML to `Selection`, and back.

[collectives]
library = "nccl"                   # or "mpich" (default), "openmpi", "gloo"
bcast = "chain"                    # a fixed choice
segment = "64 KiB"                 # of the chain and the double tree
[collectives.nccl]
bus = "96 GB/s"                    # of the rings of all channels together
channels = 8
gpu = "hopper"                     # or "volta", "ampere", "blackwell"
cpu = "intel"                      # or "amd"
ll128 = true
algorithm = "ring"                 # or "tree": NCCL_ALGO; default: the faster one
[collectives.nccl.factors]         # α and β over the tuner's, from `spawnsim calibrate --from`
ring-LL = [1.3, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.models.collectives import Selection
from spawnsim.models.collectives.nccl import CPUS, GPUS, Nccl
from spawnsim.models.platform.links import quoted, speed_text
from spawnsim.models.platform.reading import Section


def read_selection(section: Section) -> Selection:
    """Return the choice that a `[collectives]` table describes."""

    def library(value: object) -> str:
        return "nccl" if value == "nccl" else Selection(library=str(value)).library

    def pair(operation: str) -> tuple[str, str]:
        return section.get(operation, lambda value: Selection(fixed=((operation, str(value)),)).fixed[0])

    # Each value is checked by making a Selection of it alone, so that an error names its line.
    settings: dict[str, Any] = {"library": section.get("library", library, "mpich")}
    if section.has("segment"):
        settings["segment_bytes"] = section.nbytes("segment")
    if section.has("nccl"):
        settings["nccl"] = _nccl(section.section("nccl"))
    fixed = tuple(pair(key) for key in section.values if key not in ("library", "segment", "nccl"))
    return section.build(Selection, fixed=fixed, **settings)


def _nccl(section: Section) -> Nccl:
    factors = section.section("factors")
    built = section.build(
        Nccl,
        bus_Bps=section.bytes_per_second("bus"),
        channels=section.integer("channels", 8),
        gpu=section.choice("gpu", GPUS, "hopper"),
        cpu=section.choice("cpu", CPUS, "intel"),
        ll128=section.flag("ll128", True),
        algorithm=section.choice("algorithm", ("ring", "tree"), ""),
        factors=tuple((pair, *factors.get(pair, _factor)) for pair in factors.values),
    )
    section.close()
    return built


def _factor(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(x, (int, float)) for x in value):
        raise ParameterError(f"{value!r}: write the factors of α and β, such as [1.3, 1.0]")
    return float(value[0]), float(value[1])


def selection_lines(selection: Selection) -> Iterator[str]:
    """Yield the lines that `read_selection` reads back."""
    yield "[collectives]"
    yield f"library = {quoted(selection.library)}"
    if selection.segment_bytes != Selection.segment_bytes:
        yield f"segment = {quoted(f'{selection.segment_bytes} B')}"
    for operation, algorithm in selection.fixed:
        yield f"{operation} = {quoted(algorithm)}"
    nccl = selection.nccl
    if nccl is None:
        return
    yield "[collectives.nccl]"
    yield f"bus = {quoted(speed_text(nccl.bus_Bps))}"
    yield f"channels = {nccl.channels}"
    yield f"gpu = {quoted(nccl.gpu)}"
    yield f"cpu = {quoted(nccl.cpu)}"
    yield f"ll128 = {str(nccl.ll128).lower()}"
    if nccl.algorithm:
        yield f"algorithm = {quoted(nccl.algorithm)}"
    if nccl.factors:
        yield "[collectives.nccl.factors]"
        yield from (f"{pair} = [{alpha!r}, {beta!r}]" for pair, alpha, beta in nccl.factors)
