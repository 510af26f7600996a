"""Runs as files of other tools, and their files as runs: Chakra execution traces, traces of the PyTorch profiler."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim.cli import main
from spawnsim.errors import ParameterError
from spawnsim.fidelity import chakra
from spawnsim.fidelity.chakra import COLL, COMP, RECV, SEND, Node, read_nodes, read_traces, write_nodes
from spawnsim.fidelity.inputs import read_kineto
from spawnsim.models.network import Hockney, Switch
from spawnsim.phantoms import PhantomArray

LINK = Switch(Hockney(1e-3, 1e6))  # times in whole microseconds

# Serialised by protobuf's own runtime (6.x) from the fields of et_def.proto.
GOLDEN = (
    "08ac021209416c6c72656475636518072a0301ab02300538c801520f0a09636f6d6d5f73697a6548"
    "80f104520d0a0770675f6e616d65ea010131520e0a0969735f6370755f6f70d80101"
)


def program(comm: Any) -> None:
    """Compute, meet in all and in halves, send, and compute beside a collective."""
    half = comm.Split(comm.rank % 2)
    for step in range(3):
        with comm.compute(0.010):
            pass
        comm.Allreduce(np.ones(1000), np.zeros(1000))
        half.Allgather(np.ones(100), np.zeros(100 * half.size))
        if comm.rank < 2:
            comm.Sendrecv(np.ones(500), 1 - comm.rank, 3, np.zeros(500), 1 - comm.rank, 3)
        request = comm.Iallreduce(np.ones(1000), np.zeros(1000))
        with comm.compute(0.002):
            pass
        request.Wait()
        comm.Bcast(np.ones(2000), 1)
        comm.Barrier()
        comm.record(iteration=step)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a traced run of six ranks."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "platform.toml").write_text(
        '[network]\ntopology = "switch"\n[network.link]\nlatency = "1 ms"\nbandwidth = "1 MB/s"\n',
        encoding="utf-8",
    )
    spawnsim.run(program, ranks=6, platform=str(folder / "platform.toml"), out=folder / "run", trace=True)
    return folder


def test_nodes_are_messages_of_protocol_buffers(tmp_path: Path) -> None:
    """The bytes that protobuf makes; and any node is read back, negative numbers and long lists too."""
    node = Node(
        300, COLL, "Allreduce", [1, 299], 5, 200, {"comm_size": 80000, "pg_name": "1", "is_cpu_op": True}
    )
    assert chakra.encoded(node).hex() == GOLDEN
    others = [Node(k, COMP, "ä" * k, list(range(k)), 1 << k, k, {"root": -k, "f": False}) for k in range(60)]
    write_nodes(tmp_path / "a.0.et", others)
    assert read_nodes(tmp_path / "a.0.et") == others


def test_a_trace_of_a_run_is_a_program_that_takes_as_long(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written, read, and run again on the same platform: the same time to the microseconds that Chakra keeps."""
    assert main(["trace", str(traced / "run"), "--format", "chakra", "--out", str(traced / "et")]) == 0
    told = capsys.readouterr()
    # Six ranks, three rounds: computing twice; five collectives; two messages among ranks 0 and 1.
    assert "90 COMM_COLL_NODE, 6 COMM_RECV_NODE, 6 COMM_SEND_NODE, 36 COMP_NODE" in told.out
    assert "no node for these calls: 6 Split" in told.err
    assert "nodes that ASTRA-sim refuses, unlike Chakra: 18 Barrier\n" in told.err
    groups = json.loads((traced / "et/comm_group.json").read_text())
    assert sorted(groups.values()) == [[0, 1, 2, 3, 4, 5], [0, 2, 4], [1, 3, 5]]
    assert min(map(int, groups)) > 0  # ASTRA-sim keeps 0 for all ranks
    files = [str(traced / f"et/trace.{rank}.et") for rank in range(6)]
    assert main(["import", "chakra", *files, "--out", str(traced / "again.py")]) == 0
    command = ["run", str(traced / "again.py"), "--ranks", "6", "--platform", str(traced / "platform.toml")]
    assert main([*command, "--out", str(traced / "again")]) == 0
    first, again = (
        json.loads((traced / name / "run.json").read_text())["totals"]["virtual_seconds"]
        for name in ("run", "again")
    )
    # Groups are made by other calls than Split, before anything else.
    assert again == pytest.approx(first, abs=0.010)
    with pytest.raises(ParameterError, match="6 ranks: run it on as many, not 2"):
        spawnsim.run(lambda comm: chakra.replay(comm, traced / "again.json"), ranks=2)


def replayed(folder: Path, ranks: list[list[Node]]) -> list[float]:
    """Write traces, read them and carry them out; return when each rank has ended."""
    for rank, nodes in enumerate(ranks):
        write_nodes(folder / f"t.{rank}.et", nodes)
    paths = [folder / f"t.{rank}.et" for rank in range(len(ranks))]
    (folder / "t.json").write_text(json.dumps(read_traces(paths)), encoding="utf-8")

    def carry_out(comm: Any) -> None:
        chakra.replay(comm, folder / "t.json")
        comm.record(at=comm.clock.now())

    table = spawnsim.run(carry_out, ranks=len(ranks), platform=LINK).table
    return [float(table["at"][table["rank"] == rank][0]) for rank in range(len(ranks))]


def test_what_does_not_depend_goes_on_beside(tmp_path: Path) -> None:
    """A message of 50 ms beside 30 ms of computing, then 5 ms that need both: 56 ms; one behind the other, 86."""
    size = {"comm_size": 50_000, "comm_tag": 0}
    beside = [
        [Node(1, SEND, attr=size | {"comm_dst": 1})],
        [
            Node(7, RECV, attr=size | {"comm_src": 0}),
            Node(8, COMP, lasts_us=30_000),
            Node(9, COMP, deps=[7, 8], lasts_us=5_000),
        ],
    ]
    assert replayed(tmp_path, beside)[1] == pytest.approx(0.056)
    beside[1][1].deps = [7]
    assert replayed(tmp_path, beside)[1] == pytest.approx(0.086)
    beside[1].reverse()  # the order of the file is not that of dependencies
    assert replayed(tmp_path, beside)[1] == pytest.approx(0.086)


def test_every_collective_of_chakra_runs(tmp_path: Path) -> None:
    """Each takes what the call itself takes on as many ranks."""
    for number, name in enumerate(chakra.COLLECTIVES):
        nodes = [
            [Node(1, COLL, name, attr={"comm_size": 6000, "comm_type": number, "root": 1})] for _ in range(4)
        ]
        if name == "barrier":
            expected = spawnsim.run(lambda comm: comm.Barrier(), ranks=4, platform=LINK)
        elif name == "allreduce":
            arrays = PhantomArray(6000, "u1"), PhantomArray(6000, "u1")
            expected = spawnsim.run(lambda comm, a=arrays: comm.Allreduce(*a), ranks=4, platform=LINK)
        else:
            expected = None
        ends = replayed(tmp_path, nodes)
        assert max(ends) > 1e-3, name
        if expected is not None:
            assert max(ends) == expected.totals["virtual_seconds"]


def _files(folder: Path, **of: Node) -> list[Path]:
    for name, node in of.items():
        write_nodes(folder / f"{name}.et", [node])
    return [folder / f"{name}.et" for name in of]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (Node(1, SEND, attr={"comm_size": 3}), r"t\.0\.et: node 1 \(\): comm_dst is None"),
        (Node(1, COLL, attr={"comm_size": -3, "comm_type": 0}), "comm_size is -3"),
        (Node(1, COLL, attr={"comm_size": 3, "comm_type": 99}), "comm_type 99 is not known"),
        (Node(1, COMP, deps=[2]), r"node 1: data_deps: no node 2"),
        (Node(1, COMP, deps=[1]), r"node 1: data_deps: it depends on itself"),
    ],
)
def test_traces_that_make_no_sense(tmp_path: Path, node: Node, words: str) -> None:
    """File, node and attribute."""
    write_nodes(tmp_path / "t.0.et", [node])
    with pytest.raises(ParameterError, match=words):
        read_traces([tmp_path / "t.0.et"])


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    """Cut off anywhere, of other names, of a rank that is missing, of nobody."""
    good = [Node(k, COMP, "compute", [k - 1] if k else [], 0, 5, {"pg_name": "1"}) for k in range(4)]
    path = tmp_path / "t.0.et"
    write_nodes(path, good)
    whole = path.read_bytes()
    told = 0
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        try:
            assert len(read_nodes(path)) < 4  # between two messages
        except ParameterError as error:
            told += f"{path}: " in str(error)
    assert told == len(whole) - 5  # but for the ends of the metadata and of the first three nodes
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ParameterError, match=r"t\.0\.et: .*no Chakra trace"):
        read_nodes(path)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_nodes(tmp_path / "none.0.et")
    write_nodes(path, [good[0], good[0]])
    with pytest.raises(ParameterError, match="node 0 is there 2 times"):
        read_nodes(path)
    write_nodes(path, good)
    write_nodes(tmp_path / "t.2.et", good)
    with pytest.raises(ParameterError, match="no file is of rank 1"):
        read_traces([path, tmp_path / "t.2.et"])
    with pytest.raises(ParameterError, match=r"NAME\.RANK\.et"):
        read_traces([tmp_path / "t.et"])
    (tmp_path / "comm_group.json").write_text("[3]")
    with pytest.raises(ParameterError, match=r"comm_group\.json: not a list of ranks"):
        read_traces([path])
    (tmp_path / "comm_group.json").unlink()
    with pytest.raises(ParameterError, match=r"a program is a \.py file"):
        main_error("import", "chakra", str(tmp_path / "t.0.et"), "--out", str(tmp_path / "x.txt"))


def main_error(*arguments: str) -> None:
    """Run a command, and raise what it says."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert main(list(arguments)) == 2
    raise ParameterError(told.getvalue())


# ---------------------------------------------------------------------------------------------- the PyTorch profiler
def test_a_run_as_the_profiler_writes_it(traced: Path) -> None:
    """Kernels of computing and of communication, their launches, and steps; what is read back is what was computed."""
    assert (
        main(["trace", str(traced / "run"), "--format", "kineto", "--out", str(traced / "k"), "--ranks", "4"])
        == 0
    )
    paths = sorted((traced / "k").iterdir())
    assert [path.name for path in paths] == [f"rank_{rank}.json" for rank in range(4)]
    document = json.loads(paths[2].read_text())
    assert document["distributedInfo"] == {"backend": "spawnsim", "rank": 2, "world_size": 6}
    kernels = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    computing = [event["dur"] for event in kernels if event["args"]["stream"] == 7]
    assert computing == pytest.approx([10_000.0, 2_000.0] * 3)
    assert {event["name"] for event in kernels} >= {
        "compute",
        "ncclDevKernel_Allreduce",
        "ncclDevKernel_Barrier",
    }
    launches = {
        event["args"]["correlation"]
        for event in document["traceEvents"]
        if event.get("cat") == "cuda_runtime"
    }
    assert launches == {event["args"]["correlation"] for event in kernels}
    for path, row in zip(paths, read_kineto(paths).rows, strict=True):
        # A step without its exposed communication: what it computed, and the time in no call.
        assert np.asarray(row) == pytest.approx([0.012] * 3, abs=1e-6), path
    with pytest.raises(ParameterError, match="one run, and a folder"):
        main_error("trace", str(traced / "run"), "--format", "kineto")
