"""A platform as the text of a TOML file, for those that were measured.

This room knows the keys, as `networks` reads them. It must not know what the values do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from spawnsim.errors import UnsupportedError
from spawnsim.virtual.network import Hockney, Link, LogGP, Network, Nodes, Piecewise, Switch
from spawnsim.virtual.platform.model import Platform


def to_toml(platform: Platform, comments: Iterable[str] = ()) -> str:
    """Return the text that `load_platform` reads back as this platform, after comment lines.

    Raises:
        UnsupportedError: A network or step that no TOML describes yet.
    """
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines += [f"name = {_text(platform.name)}", f"description = {_text(platform.description)}"]
    lines += [f"progress = {_text(platform.progress)}", "", *_network(platform.network), "", "[collectives]"]
    lines += [f"library = {_text(platform.collectives.library)}"]
    lines += [f"{operation} = {_text(algorithm)}" for operation, algorithm in platform.collectives.fixed]
    lines += ["", "[compute]"]
    lines += [] if platform.step is None else [f"step = {_text(_seconds(_step_s(platform)))}"]
    if platform.stragglers:
        lines.append(f"stragglers = {_text('+'.join(map(str, platform.stragglers)))}")
    if platform.fitted:
        lines += ["", "[fitted]", *(f"{key} = {_text(value)}" for key, value in platform.fitted)]
    return "\n".join(lines) + "\n"


def _step_s(platform: Platform) -> float:
    duration_s = getattr(platform.step, "duration_s", None)
    if duration_s is None:
        raise UnsupportedError(
            "a platform file holds a step of fixed length; name a trace with --compute instead"
        )
    return float(duration_s)


def _network(network: Network) -> Iterator[str]:
    yield "[network]"
    yield f"topology = {_text('nodes' if isinstance(network, Nodes) else 'switch')}"
    yield f"call_overhead = {_text(_seconds(network.call_overhead_s))}"
    yield f"eager = {_text(f'{network.eager_bytes} B')}"
    if network.contention != "serial":
        yield f"contention = {_text(network.contention)}"
    if network.gamma_s_per_B:
        yield f"reduction = {_text(_speed(1.0 / network.gamma_s_per_B))}"
    if isinstance(network, Switch):
        yield from _link("network.link", network.link)
    elif isinstance(network, Nodes):
        yield f"ranks_per_node = {network.ranks_per_node}"
        if network.nodes is not None:
            yield f"nodes = {network.nodes}"
        yield from _link("network.intra", network.intra)
        yield from _link("network.inter", network.inter)
    else:
        raise UnsupportedError(f"a {type(network).__name__} network cannot be written to a platform file yet")


def _link(table: str, link: Link) -> Iterator[str]:
    yield f"[{table}]"
    if isinstance(link, Piecewise):
        yield f"model = {_text('piecewise')}"
        for from_bytes, step in link.steps:
            yield f"[[{table}.steps]]"
            yield f"from = {_text(f'{from_bytes} B')}"
            yield from _plain(step)
    else:
        yield from _plain(link)


def _plain(link: Link) -> Iterator[str]:
    if isinstance(link, Hockney):
        yield f"latency = {_text(_seconds(link.latency_s))}"
        yield f"bandwidth = {_text(_speed(link.bandwidth_Bps))}"
    elif isinstance(link, LogGP):
        yield f"model = {_text('loggp')}"
        for key, value in (("latency", link.L), ("overhead", link.o), ("gap", link.g)):
            yield f"{key} = {_text(_seconds(value))}"
        yield f"bandwidth = {_text(_speed(1.0 / link.G))}"
    else:
        raise UnsupportedError(f"a {type(link).__name__} link cannot be written to a platform file yet")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.9g} us"


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 1e-6:.9g} MB/s"
