"""Platforms: presets, checked TOML with file, line and key, writing and reading back."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from spawnsim import units
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import Fixed, Lognormal, Trace
from spawnsim.models.network import (
    Dragonfly,
    FatTree,
    Hockney,
    HomeLinks,
    LogGP,
    Nodes,
    Piecewise,
    Regions,
    Switch,
    Torus,
)
from spawnsim.models.platform import DEFAULT, Platform, list_platforms, load_platform, to_toml
from spawnsim.models.platform.reading import line_of

PRESETS = [platform.name for platform in list_platforms()]

GOOD = """\
description = "a test"
progress = "async"

[network]
topology = "nodes"
ranks_per_node = 4
eager = "8 KiB"

[network.intra]
latency = "1 us"
bandwidth = "10 GB/s"

[network.inter]
model = "loggp"
latency = "5 us"
overhead = "1 us"
gap = "2 us"
bandwidth = "25 Gbit/s"

[collectives]
library = "openmpi"
allreduce = "ring"

[compute]
step = "50 ms"
stragglers = "lognormal:0.3"
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_presets_are_there() -> None:
    """The clusters that users have."""
    wanted = {"laptop", "gigabit", "ethernet-10g", "ethernet-100g", "infiniband-hdr", "infiniband-ndr"}
    assert wanted | {"nvlink-ib", "cloud-spot", "wan-volunteers"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_describes_itself_and_its_sources(name: str) -> None:
    """One sentence, a compute step, a cost that grows with size, and comments that say where the numbers are from."""
    platform = load_platform(name)
    assert platform.description
    assert platform.step == Fixed(0.01)
    small, large = (platform.network.cost(0, 1, nbytes).flight_s for nbytes in (8, 8_000_000))
    assert 0.0 < small < large
    text = (resources.files("spawnsim.models.platform") / "presets" / f"{name}.toml").read_text("utf-8")
    assert text.count("#") >= 2


def test_the_default_is_a_plain_cluster() -> None:
    """None is ethernet-10g; objects and networks pass through."""
    default = load_platform(None)
    assert default.name == DEFAULT == "ethernet-10g"
    assert load_platform(default) is default
    bare = load_platform(Switch(Hockney(1e-6, 1e9)))
    assert (bare.name, bare.step) == ("switch", None)


def test_a_file_is_read_in_full(tmp_path: Path) -> None:
    """Every part arrives as the object that it names."""
    platform = load_platform(_file(tmp_path, GOOD))
    inter = LogGP(L=units.seconds("5 us"), o=1e-6, g=2e-6, G=1 / 3.125e9)
    assert platform == Platform(
        name="mine",
        description="a test",
        network=Nodes(Hockney(1e-6, 10e9), inter, ranks_per_node=4, eager_bytes=8192),
        progress="async",
        collectives=Selection("openmpi", (("allreduce", "ring"),)),
        step=Fixed(0.05),
        stragglers=(Lognormal(0.3),),
    )


def test_the_run_goes_before_the_platform() -> None:
    """An explicit compute time or straggler overrides; without one the platform's stand."""
    platform = Platform("p", Switch(Hockney(1e-6, 1e9)), step=Fixed(0.01), stragglers=(Lognormal(0.3),))
    assert platform.compute_model().base == Fixed(0.01)
    model = platform.compute_model("50ms", "constant")
    assert model.open(0, 0)(None, 0.0) == 0.05


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            'latency = "1 us"',
            'latency = "1 parsec"',
            10,
            "network.intra.latency: '1 parsec' is not a duration",
        ),
        ('latency = "1 us"', "latency = 1", 10, "write a text with a unit"),
        ('latency = "1 us"', 'latency = "-1 us"', 10, "at least 0"),
        ('bandwidth = "10 GB/s"', 'bandwidth = "0 GB/s"', 11, "above 0"),
        ('bandwidth = "10 GB/s"', 'bandwidth = "10 GB"', 11, "not a bandwidth"),
        ('bandwidth = "10 GB/s"', "", 9, "network.intra.bandwidth: missing"),
        ('latency = "5 us"', 'latncy = "5 us"', 13, "network.inter.latency: missing"),
        ('gap = "2 us"', 'gap = "2 us"\nzoom = 3', 18, "network.inter.zoom: no such key; here are allowed"),
        ('eager = "8 KiB"', 'eagr = "8 KiB"', 7, "did you mean eager"),
        ("ranks_per_node = 4", "ranks_per_node = 0", 6, "at least 1"),
        ("ranks_per_node = 4", f"ranks_per_node = {10**30}", 6, "at most 1,000,000,000"),
        ('step = "50 ms"', 'step = "1e300 s"', 25, "is too long: give a duration of at most 1e+12 s"),
        ("ranks_per_node = 4", 'ranks_per_node = "4"', 6, "write an integer"),
        ('topology = "nodes"', 'topology = "star"', 5, "write one of switch, nodes, fat-tree"),
        ('model = "loggp"', 'model = "magic"', 14, "write one of hockney"),
        ('progress = "async"', 'progress = "never"', 2, "poll, async, hardware"),
        (
            'allreduce = "ring"',
            'allreduce = "rings"',
            22,
            "collectives.allreduce: allreduce has no algorithm",
        ),
        ('library = "openmpi"', 'library = "nompi"', 21, "choose one of mpich"),
        (
            'stragglers = "lognormal:0.3"',
            'stragglers = "lognormal"',
            26,
            "compute.stragglers: straggler 'lognormal'",
        ),
        ('step = "50 ms"', 'step = "-50 ms"', 25, "at least 0"),
        ("[compute]", "[compute]\nsteps = 3", 25, "did you mean step"),
        ("[collectives]", "[colectives]", 20, "no such key; did you mean collectives"),
        ('description = "a test"', "description = 3", 1, "write a text"),
    ],
)
def test_an_error_names_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    """Where to look, and what to write there."""
    path = _file(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(
        ParameterError, match=re.escape(f"mine.toml, line {line}: ") + ".*" + re.escape(message)
    ):
        load_platform(path)


LINK = 'link = {latency = "1 us", bandwidth = "10 GB/s"}'
TOPOLOGIES = {
    f'topology = "fat-tree"\n{LINK}\nradices = [4, 4]\nhop_latency = "1 us"\noversubscription = 2.0': FatTree(
        Hockney(1e-6, 10e9), (4, 4), 1e-6, 2.0
    ),
    f'topology = "torus"\n{LINK}\nshape = [3, 4]\nranks_per_node = 2': Torus(
        Hockney(1e-6, 10e9), (3, 4), ranks_per_node=2
    ),
    f'topology = "dragonfly"\n{LINK}\nranks_per_router = 2\nrouters_per_group = 3\ngroups = 4\nglobal_share = 0.5': (
        Dragonfly(Hockney(1e-6, 10e9), 2, 3, 4, global_share=0.5)
    ),
    'topology = "regions"\nmembers = [2, 1]\nlatency = [["1 ms", "40 ms"], ["40 ms", "1 ms"]]\n'
    'bandwidth = [["1 GB/s", "1 MB/s"], ["1 MB/s", "1 GB/s"]]': Regions.between(
        (2, 1), [[1e-3, 0.04], [0.04, 1e-3]], [[1e9, 1e6], [1e6, 1e9]]
    ),
    'topology = "home"\nranks = 3\nlatency = "50 ms"\nup = "10 Mbit/s"\ndown = "100 Mbit/s"': HomeLinks.alike(
        3, 0.05, 1.25e6, 12.5e6
    ),
}


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_every_topology_has_a_table(tmp_path: Path, text: str) -> None:
    """What the network room builds can be written down."""
    network, wanted = load_platform(_file(tmp_path, f"[network]\n{text}\n")).network, TOPOLOGIES[text]
    assert type(network) is type(wanted)
    assert network.cost(0, 2, 10**6) == pytest.approx(wanted.cost(0, 2, 10**6))


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (f'"torus"\n{LINK}\nshape = [1000000, 1000000, 1000000]', "room for 1,000,000,000,000,000,000 ranks"),
        (f'"torus"\n{LINK}\nshape = [5000000]', "2,500,000 hops; give 10,000 at most"),
        (f'"fat-tree"\n{LINK}\nradices = [100000, 100000]', "room for 10,000,000,000 ranks"),
        (f'"dragonfly"\n{LINK}\nranks_per_router = 9999\nrouters_per_group = 9999\ngroups = 9', "room for"),
        ('"regions"\nmembers = [999999999]\nlatency = [["1 ms"]]\nbandwidth = [["1 GB/s"]]', "room for"),
        ('"home"\nranks = 999999999\nlatency = "50 ms"\nup = "1 MB/s"\ndown = "1 MB/s"', "network.ranks"),
    ],
)
def test_a_network_too_large_to_build_is_refused_before_it_is_built(
    tmp_path: Path, topology: str, words: str
) -> None:
    """The sizes of a damaged or careless file must not ask for all memory."""
    with pytest.raises(ParameterError, match=words):
        load_platform(_file(tmp_path, f"[network]\ntopology = {topology}\n"))


def test_tables_of_regions_name_their_line(tmp_path: Path) -> None:
    """A bad entry, and a table of the wrong shape."""
    text = next(text for text in TOPOLOGIES if "regions" in text)
    with pytest.raises(
        ParameterError, match=r"mine.toml, line 4: network.latency: '40 m' is not a duration: .* s, min, h$"
    ):
        load_platform(_file(tmp_path, "[network]\n" + text.replace("40 ms", "40 m", 1)))
    with pytest.raises(ParameterError, match=r"line 4: network.latency: 3 regions need 3 rows"):
        load_platform(_file(tmp_path, "[network]\n" + text.replace("[2, 1]", "[2, 1, 1]")))


def test_volunteers_differ_and_send_slower_than_they_receive() -> None:
    """Adding ranks changes nobody's line."""
    home = load_platform("wan-volunteers").network
    assert isinstance(home, HomeLinks)
    assert np.median(home.up_Bps) == pytest.approx(25e6 / 8, rel=0.05)
    assert np.median(home.down_Bps) == pytest.approx(100e6 / 8, rel=0.05)
    assert len(set(home.up_Bps)) > 16000


def test_broken_files_are_one_clear_error(tmp_path: Path) -> None:
    """No TOML, no such file, no such preset."""
    with pytest.raises(ParameterError, match=r"mine.toml: not valid TOML: .*line 1"):
        load_platform(_file(tmp_path, "a =\n"))
    with pytest.raises(ParameterError, match="cannot read"):
        load_platform(tmp_path / "nosuch.toml")
    with pytest.raises(ParameterError, match=r"did you mean gigabit\? .*ethernet-10g"):
        load_platform("gigabits")
    with pytest.raises(ParameterError, match="give a name"):
        load_platform(3)  # type: ignore[arg-type]


def test_lines_are_found_in_any_style_of_toml() -> None:
    """Dotted keys, inline tables, lists of tables."""
    text = 'a.b = 1\n[c]\nd = {e = 1}\n[[f.g]]\nh = 1\n[[f.g]]\nh = 2\n["x"]\ny = 1\n'
    found = [
        line_of(text, path) for path in (("a", "b"), ("c", "d", "e"), ("f", "g", 1, "h"), ("x", "y"), ("n",))
    ]
    assert found == [1, 3, 7, 9, 1]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "wan-volunteers"])
def test_a_platform_is_written_and_read_back(tmp_path: Path, name: str) -> None:
    """What a calibration writes."""
    platform = load_platform(name)
    assert load_platform(_file(tmp_path, to_toml(platform, ["measured", ""]))) == platform


def test_a_measured_platform_is_written_and_read_back(tmp_path: Path) -> None:
    """Piecewise links and what they were measured on."""
    link = Piecewise(((0, LogGP(1e-6, 2e-7, 3e-7, 1e-10)), (65536, Hockney(4e-6, 6e9))))
    platform = Platform(
        "here",
        Switch(
            link,
            gamma_s_per_B=2.5e-10,
            gamma_beyond=(32 << 20, 4e-10),
            window=Piecewise(((0, Hockney(1e-6, 5e9)), (8192, Hockney(2e-6, 9e9)))),
        ),
        collectives=Selection("mpich", (("bcast", "chain"),)),
        fitted=(("mpi", 'MPICH 5.0 "ch4"'),),
    )
    read = load_platform(_file(tmp_path, to_toml(platform)))
    assert read.fitted == platform.fitted
    for nbytes in (1, 32 << 20, np.array([8, 64 << 20])):
        assert read.network.reduce_s(nbytes) == pytest.approx(platform.network.reduce_s(nbytes), rel=1e-8)
    for nbytes in (1, 65535, 65536, 10**7):
        assert read.network.cost(0, 1, nbytes) == pytest.approx(platform.network.cost(0, 1, nbytes), rel=1e-8)
        assert read.network.copy_s(0, 1, nbytes) == pytest.approx(
            platform.network.copy_s(0, 1, nbytes), rel=1e-8
        )


def test_speeds_of_reductions_by_dtype_are_read_written_and_checked(tmp_path: Path) -> None:
    """A dtype without a speed of its own takes the default; a misspelt one is an error."""
    text = GOOD.replace("[network]", '[network]\nreduction = { default = "4 GB/s", bfloat16 = "2 GB/s" }', 1)
    text = "\n".join(line for line in text.splitlines() if not line.startswith('reduction = "'))
    platform = load_platform(_file(tmp_path, text))
    for again in (platform, load_platform(_file(tmp_path, to_toml(platform)))):
        for dtype, speed in {"bfloat16": 2e9, "float32": 4e9, "": 4e9}.items():
            assert again.network.reduce_s(4e9, dtype) == pytest.approx(4e9 / speed)
    for old, new, message in (
        ("bfloat16", "bfloat61", "'bfloat61' is not a dtype: give float16, bfloat16"),
        ('default = "4 GB/s", ', "", "network.reduction.default: missing"),
        ("reduction =", 'reduction_beyond = ["1 MiB", "1 GB/s"]\nreduction =', "by dtype or by size"),
    ):
        with pytest.raises(ParameterError, match=re.escape(message)):
            load_platform(_file(tmp_path, text.replace(old, new, 1)))


def test_what_no_file_can_hold_is_refused() -> None:
    """A trace is a file of its own."""
    with pytest.raises(UnsupportedError, match="--compute"):
        to_toml(Platform("p", Switch(Hockney(1e-6, 1e9)), step=Trace([[0.1]])))


def test_a_platform_checks_its_progress_and_its_room() -> None:
    """Bad words and too many ranks."""
    with pytest.raises(ParameterError, match="poll, async, hardware"):
        Platform("p", Switch(Hockney(1e-6, 1e9)), progress="never")  # type: ignore[arg-type]
    small = Platform("p", Nodes(Hockney(1e-6, 1e9), Hockney(1e-6, 1e9), ranks_per_node=2, nodes=2))
    small.check(4)
    with pytest.raises(ParameterError, match="5 ranks do not fit"):
        small.check(5)
