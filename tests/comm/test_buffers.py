"""Buffer specifications: mpi4py's grammar, memory of several libraries, copies out and in."""

import array

import numpy as np
import pytest

from spawnsim import comm
from spawnsim.comm.datatypes import BY_NAME
from spawnsim.comm.memory import address, buffer
from spawnsim.errors import ParameterError

DATA = np.arange(4.0)
VECTOR = comm.DOUBLE.Create_vector(2, 1, 2).Commit()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (DATA, [0, 1, 2, 3]), ([DATA, 2], [0, 1]), ([DATA, comm.DOUBLE], [0, 1, 2, 3]), ([DATA, "d"], [0, 1, 2, 3]),
        ([DATA, 2, comm.DOUBLE], [0, 1]), ([DATA, (2, 1)], [1, 2]), ([DATA, (2, 1), comm.DOUBLE], [1, 2]),
        ([DATA, 2, 1, "d"], [1, 2]), ((DATA, 3, None), [0, 1, 2]), ([DATA, None], [0, 1, 2, 3]),
        ([DATA, None, "d"], [0, 1, 2, 3]), (DATA.reshape(2, 2), [0, 1, 2, 3]), (DATA.reshape(2, 2).T, [0, 1, 2, 3]),
        (np.float64(3), [3]), (np.array(3.0), [3]), (np.zeros(0), []), (memoryview(DATA), [0, 1, 2, 3]),
        (array.array("d", [5, 6]), [5, 6]), ([None, 0, comm.DOUBLE], []), ([DATA, 0], []),
    ],
)  # fmt: skip
def test_specifications(spec, expected):
    """All forms of mpi4py name the elements they name there."""
    message = comm.as_buffer(spec)
    assert message.pack().tolist() == expected
    assert (message.count, message.nbytes) == (len(expected), 8 * len(expected))


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (3, TypeError, "not a buffer"), ("abc", TypeError, "not a buffer"), ((DATA,), ValueError, "2 to 4"),
        ([DATA, "zz"], KeyError, "'zz'"), ([DATA, -1], ValueError, "negative count"), ([DATA, 1.5], TypeError, "float"),
        (DATA[::2], BufferError, "not contiguous"), ([None, 1, comm.INT], ValueError, "but the buffer has 0"),
        ([DATA, 9], ValueError, "span bytes 0 to 72"), ([DATA, comm.DATATYPE_NULL], ValueError, "cannot infer"),
        ([np.zeros(3, "i4"), "d"], ValueError, "not a multiple"), (np.zeros(3, ">f8"), BufferError, "byte order"),
        (np.zeros(2, "i4,f4"), KeyError, "cannot map dtype"), ([DATA, (2, -1)], ValueError, "negative displacement"),
        ([DATA, (1, 9)], ValueError, "out of bounds"), (np.array([None]), KeyError, "object"),
        ([DATA, comm.DOUBLE.Create_contiguous(2)], comm.MPIException, "Commit"),
    ],
)  # fmt: skip
def test_bad_specifications(spec, error, match):
    """A specification that mpi4py refuses is refused with the same type of error; so are counts beyond the memory."""
    with pytest.raises(error, match=match):
        comm.as_buffer(spec)


def test_blocks():
    """A buffer of several blocks counts per block, and hands them out."""
    message = comm.as_buffer(np.arange(6.0), blocks=3)
    assert (message.count, message.nbytes, message.block(1).pack().tolist()) == (2, 48, [2, 3])
    message.block(2).unpack(np.array([7.0, 8.0]))
    assert message.array.tolist() == [0, 1, 2, 3, 7, 8]
    with pytest.raises(ValueError, match="do not divide into 4 blocks"):
        comm.as_buffer(np.arange(6.0), blocks=4)


def test_blocks_of_derived_types():
    """Blocks of a derived type start at multiples of its extent."""
    pairs = comm.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 32).Commit()
    message = comm.as_buffer([np.arange(8.0), 1, pairs], blocks=2)
    assert message.block(1).pack().view(float).tolist() == [4, 6]


def test_unpack_writes_through():
    """Unpacking writes to the user's memory, shorter messages to its start."""
    target = np.zeros(4)
    assert comm.as_buffer(target).unpack(np.array([1.0, 2.0])) == 16
    assert target.tolist() == [1, 2, 0, 0]
    comm.as_buffer([target, 1, VECTOR]).unpack(np.array([8.0, 9.0]).view(np.uint8))
    assert target.tolist() == [8, 2, 9, 0]


def test_bytes_and_types_may_differ_in_kind():
    """A message sent as bytes is received as doubles, and the other way round."""
    target = np.zeros(2)
    comm.as_buffer(target).unpack(comm.as_buffer(np.array([1.0, 2.0]).tobytes()).pack())
    assert target.tolist() == [1, 2]
    raw = bytearray(16)
    comm.as_buffer(raw).unpack(comm.as_buffer(target).pack())
    assert bytes(raw) == target.tobytes()


def test_truncation_is_an_error_of_three_names():
    """A message longer than the buffer is TruncationError, UsageError and MPI.Exception with ERR_TRUNCATE."""
    from spawnsim import errors

    with pytest.raises(errors.TruncationError) as error:
        comm.as_buffer(np.zeros(2)).unpack(np.zeros(3))
    assert isinstance(error.value, comm.MPIException)
    assert error.value.Get_error_class() == 14
    assert "24 bytes does not fit a buffer of 16" in str(error.value)


def test_read_only_memory_cannot_receive():
    """Receiving into bytes or a frozen array is a clear error, early if asked."""
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for spec in (b"abcd", frozen, [frozen, 1]):
        with pytest.raises(BufferError, match="read-only"):
            comm.as_buffer(spec, writable=True)
    with pytest.raises(BufferError, match="read-only"):
        comm.as_buffer(frozen).unpack(np.zeros(2))


def test_a_snapshot_is_owned():
    """What was packed does not change with the user's memory."""
    source = np.arange(3.0)
    for spec in (source, [source, 3, comm.DOUBLE], [source, 1, VECTOR]):
        packed = comm.as_buffer(spec).pack()
        assert not np.shares_memory(packed, source)


@pytest.mark.parametrize("name", ["DOUBLE_INT", "LONG_INT", "SHORT_INT", "LONG_DOUBLE_INT"])
def test_the_last_pair_needs_no_padding(name):
    """Numpy's packed dtypes have none; bytes behind the pairs stay as they are, and the padding between them."""
    pair = BY_NAME[name]
    size = pair.Get_true_extent()[1]
    whole = np.array([(1, 2), (3, 4), (5, 6)], pair.dtype)
    memory = np.full(2 * pair.extent + size + 1, 7, np.uint8)
    message = comm.as_buffer([memory[:-1], 3, pair], writable=True)
    assert message.unpack(comm.as_buffer([whole, 3, pair]).pack()) == 3 * pair.size
    assert message.pack().tolist() == whole.tolist()
    assert message.part(1, 2).pack().tolist() == whole[1:].tolist()
    assert message.nbytes == 3 * pair.size
    assert memory[-1] == 7
    gap = memory[2:4] if name == "SHORT_INT" else memory[size : pair.extent]
    assert set(gap.tolist()) == {7}
    with pytest.raises(ParameterError, match="but the buffer has"):
        comm.as_buffer([memory[:-2], 3, pair])


def test_pairs_travel_without_padding():
    """A pair of double and int counts 12 bytes on the wire and 16 in memory."""
    pair = BY_NAME["DOUBLE_INT"]
    source = np.array([(1.0, 2), (3.0, 4)], pair.dtype)
    target = np.zeros_like(source)
    message = comm.as_buffer([target, pair])
    assert message.nbytes == 24
    assert message.unpack(comm.as_buffer([source, 2, pair]).pack()) == 24
    assert target.tolist() == source.tolist()


def test_null_and_in_place():
    """None and IN_PLACE are empty messages; IN_PLACE says so."""
    assert [comm.as_buffer(spec).count for spec in (None, comm.IN_PLACE)] == [0, 0]
    theirs = type("InPlaceType", (int,), {})(-1)  # as mpi4py's own is
    assert comm.as_buffer(theirs).in_place and not comm.as_buffer(None).in_place
    assert [comm.as_buffer(spec).in_place for spec in (None, comm.IN_PLACE)] == [False, True]


def test_bottom_takes_absolute_addresses():
    """A struct of addresses reads and writes several arrays at once."""
    one, two = np.array([1.0, 2.0]), np.array([3, 4], np.int32)
    both = comm.Datatype.Create_struct([2, 2], [address(one), address(two)], [comm.DOUBLE, comm.INT]).Commit()
    message = comm.as_buffer([comm.BOTTOM, 1, both])
    packed = message.pack()
    assert packed.nbytes == 24
    one[:] = two[:] = 0
    message.unpack(packed)
    assert (one.tolist(), two.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "int64", "bool", "complex64", "float16"])
def test_torch_tensors(kind):
    """Tensors of all usual types go out and in, written through to the tensor."""
    torch = pytest.importorskip("torch")
    source = torch.tensor([0, 1, 2, 3]).to(getattr(torch, kind))
    target = torch.zeros_like(source)
    comm.as_buffer(target, writable=True).unpack(comm.as_buffer(source).pack())
    assert torch.equal(source, target)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_torch_tensors_in_fortran_order(kind):
    """A transposed tensor is a row of memory, as a transposed array of numpy is; other orders are refused."""
    torch = pytest.importorskip("torch")
    source = torch.arange(24.0).reshape(2, 3, 4).to(getattr(torch, kind))
    target = torch.zeros_like(source)
    comm.as_buffer(target.permute(2, 1, 0), writable=True).unpack(
        comm.as_buffer(source.permute(2, 1, 0)).pack()
    )
    assert torch.equal(source, target)
    with pytest.raises(BufferError, match="not contiguous"):
        comm.as_buffer(source.permute(0, 2, 1))


def test_bad_tensors():
    """Tensors that are no plain memory are refused with the remedy."""
    torch = pytest.importorskip("torch")
    for tensor, remedy in (
        (torch.zeros(3, requires_grad=True), "detach"),
        (torch.zeros(4, 4)[:, 1], "contiguous"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(4, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(4).to(torch.float8_e4m3fn), "its bytes"),
    ):
        with pytest.raises(BufferError, match=remedy):
            comm.as_buffer(tensor)


@pytest.mark.parametrize(
    ("spec", "counts", "displs"),
    [
        (DATA, [2, 1, 1], [0, 2, 3]), ([DATA, [1, 0, 2]], [1, 0, 2], [0, 1, 1]), ([DATA, 1], [1, 1, 1], [0, 1, 2]),
        ([DATA, ([1, 1, 1], [3, 0, 2])], [1, 1, 1], [3, 0, 2]), ([DATA, (1, 1), "d"], [1, 1, 1], [0, 1, 2]),
        ([DATA, [1, 1, 0], [0, 2, 0], comm.DOUBLE], [1, 1, 0], [0, 2, 0]),
        ([DATA, np.array([1, 1, 1]), comm.DOUBLE], [1, 1, 1], [0, 1, 2]),
    ],
)  # fmt: skip
def test_vectors(spec, counts, displs):
    """The forms of unequal blocks name the elements that mpi4py names."""
    vector = comm.as_buffer(spec, vector=True, blocks=3)
    assert (vector.counts, vector.displs) == (counts, displs)
    expected = [DATA[d : d + n].tolist() for n, d in zip(counts, displs, strict=True)]
    assert [block.pack().tolist() for block in vector] == expected


def test_vectors_unpack_in_order():
    """One row of data fills the blocks, wherever they lie."""
    target = np.zeros(5)
    comm.as_buffer([target, ([2, 1], [3, 0])], vector=True, blocks=2).unpack(np.array([1.0, 2.0, 3.0]))
    assert target.tolist() == [3, 0, 0, 1, 2]


def test_vectors_of_several_types():
    """The w form has a type per block and displacements in bytes."""
    memory = np.zeros(16, np.uint8)
    spec = [memory, ([1, 2], [8, 0]), [comm.DOUBLE, comm.INT]]
    vector = comm.as_buffer(spec, vector=True, blocks=2, types=True)
    vector.block(0).unpack(np.array([2.5]))
    vector.block(1).unpack(np.array([1, 2], np.int32))
    assert (memory[:8].view(np.int32).tolist(), memory[8:].view(float).tolist()) == ([1, 2], [2.5])


def test_bad_vectors():
    """A wrong number of counts, or a block outside the memory, is an error."""
    with pytest.raises(ValueError, match="expecting 3 counts, got 2"):
        comm.as_buffer([DATA, [1, 2]], vector=True, blocks=3)
    with pytest.raises(ValueError, match="span bytes 24 to 40"):
        comm.as_buffer([DATA, ([2], [3])], vector=True, blocks=1).block(0)


def test_targets():
    """A one-sided target defaults to the origin's count and type."""
    origin = comm.as_buffer(DATA)
    assert comm.as_target(None, origin) == (0, 4, comm.DOUBLE)
    assert comm.as_target(3, origin) == (3, 4, comm.DOUBLE)
    assert comm.as_target([3, 2, comm.INT], origin) == (3, 2, comm.INT)


def test_buffer_objects():
    """MPI's own memory behaves as mpi4py's: integer items, slices of itself, equality by identity."""
    memory = buffer.allocate(5)
    memory[0], memory[1:3] = 3, b"ab"
    assert (memory[0], bytes(memory[1:3]), len(memory), bytes(memory)) == (3, b"ab", 5, b"\x03ab\0\0")
    assert (buffer().address, memory.readonly, memory.toreadonly().readonly, memory.format) == (
        0,
        False,
        True,
        "B",
    )
    assert memory[1:5].cast("i")[0] == int.from_bytes(b"ab", "little")
    assert memory != buffer.frombuffer(memory)


@pytest.mark.parametrize("memory", [np.zeros(0), np.zeros(2), None])
def test_types_of_no_size_touch_no_memory(memory):
    """Wherever they lie: a rank whose part of something is empty passes displacements beyond its memory."""
    empty = comm.DOUBLE.Create_vector(0, 1, 1).Commit()
    given = np.zeros(0) if memory is None else memory
    one = comm.as_buffer([given, (5, 0), empty])
    assert (one.count, one.nbytes, one.pack().nbytes) == (5, 0, 0)
    many = comm.as_buffer([given, ([1, 1], [800, 1600]), [empty] * 2], vector=True, blocks=2, types=True)
    assert [block.pack().nbytes for block in many] == [0, 0]
    for block in many:
        block.unpack(np.zeros(0, np.uint8))
    with pytest.raises(ValueError, match="but the buffer has"):
        comm.as_buffer([given, 5, comm.DOUBLE])


def test_memory_by_address_is_as_long_as_the_message():
    """The length that comes with an address is no bound: a derived type reaches as far as it says, as with mpi4py."""
    array = np.arange(8.0)
    column = comm.DOUBLE.Create_vector(4, 1, 2).Commit()
    for nbytes in (0, 32, 64):
        given = comm.buffer.fromaddress(array.ctypes.data, nbytes)
        assert comm.as_buffer([given, 1, column]).pack().view(float).tolist() == [0, 2, 4, 6]
        assert comm.as_buffer([given, 8, comm.DOUBLE]).pack().tolist() == array.tolist()
        vector = comm.as_buffer([given, ([1, 2], [6, 2]), comm.DOUBLE], vector=True, blocks=2)
        assert [block.pack().tolist() for block in vector] == [[6], [2, 3]]
    comm.as_buffer([comm.buffer.fromaddress(array.ctypes.data, 0), 1, column]).unpack(np.full(4, -1.0))
    assert array.tolist() == [-1, 1, -1, 3, -1, 5, -1, 7]
    frozen = comm.buffer.fromaddress(array.ctypes.data, 0, readonly=True)
    with pytest.raises(BufferError, match="read-only"):
        comm.as_buffer([frozen, 1, column], writable=True)
    with pytest.raises(ValueError, match="but the buffer has"):
        comm.as_buffer([array[:4], 1, column])


class Exporter:
    """Lends memory by DLPack, and has it taken away when it goes: nobody else owns it."""

    def __init__(self, array, gone):
        self.array, self.gone = array, gone

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __del__(self):
        self.gone.append(1)


def test_an_exporter_by_dlpack_lives_as_long_as_its_memory_is_used():
    """The capsule is borrowed, not taken over; it and its exporter go with the buffer, and not before."""
    gone, array = [], np.arange(4.0)
    message = comm.as_buffer(Exporter(array, gone))
    assert not gone
    message.unpack(message.pack() + 1)
    assert array.tolist() == [1, 2, 3, 4]
    del message
    assert gone == [1]


@pytest.mark.parametrize("dtype", ["?", "b", "H", "i", "Q", "e", "f", "d", "F", "D"])
@pytest.mark.parametrize("version", [0, 1])
def test_types_of_dlpack(dtype, version):
    """Whatever numpy exports comes with its type, by the old protocol and by the one with versions."""

    class New(Exporter):
        def __dlpack__(self, max_version=None, copy=None):
            return self.array.__dlpack__(max_version=max_version, copy=copy)

    array = np.ones((2, 3), dtype, order="F")
    message = comm.as_buffer((New if version else Exporter)(array, []))
    assert (message.dtype, message.count) == (array.dtype, 6)
    with pytest.raises(BufferError, match="not contiguous"):
        comm.as_buffer((New if version else Exporter)(np.ones((4, 4), dtype)[:, ::2], []))
    if version:
        array.flags.writeable = False
        with pytest.raises(BufferError, match="read-only"):
            comm.as_buffer(New(array, []), writable=True)
