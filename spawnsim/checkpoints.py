"""Checkpoints: states that ranks save at the end of an iteration, in files that may be damaged or untrusted.

A checkpoint is a folder `RUN/checkpoints/ITERATION`, with one shard per real rank, or one shard of all virtual ranks.
A shard is a file in the format of safetensors (https://github.com/huggingface/safetensors): a header of JSON with the
tensors' types, shapes and places, then their bytes. All other values are JSON in its metadata, with a checksum of the
whole. Nothing is unpickled, and the sizes in a header are compared with the file's size before memory is allocated.

A shard is written next to its final place, flushed to the disk and then renamed. A checkpoint counts once all its
shards exist: a process that is killed at any time leaves the previous checkpoint intact.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spawnsim.errors import ParameterError, StorageError

FOLDER = "checkpoints"
KEPT = 2  # checkpoints: one more than necessary, in case the last one is damaged
HEADER_NBYTES = 100_000_000  # the longest header that safetensors itself reads
MOST_DEPTH = 200  # of nested lists and mappings
ALL = "all"  # the shard that holds all ranks

Bytes = Any  # a one-dimensional array of uint8
Tree = Any  # numbers, texts, None, tensors, arrays, and lists, tuples and mappings of these

# Names of types in safetensors, and in torch and numpy. Safetensors has no complex numbers.
TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES = {name: short for short, name in TYPES.items()}
_NBYTES = {
    short: 1 if short in ("BOOL", "U8", "I8") or "F8" in short else int(short[-2:]) // 8 for short in TYPES
}
_KIND, _VALUE = "$", "value"  # keys for values that JSON cannot represent


@dataclass
class Saved:
    """What `comm.restore()` returns.

    Attributes:
        iteration: as given: the iteration with which to continue.
        model, optimizer, policy: state dicts, None if not saved.
        extra: the program's other values.
        donor: the rank whose state this is: another rank than the caller if the run had fewer ranks.
    """

    iteration: int
    model: Any = None
    optimizer: Any = None
    policy: Any = None
    extra: Any = None
    donor: int = 0


@dataclass
class Shard:
    """States in their file form: `document` is JSON that names `tensors`, each with its type, shape and bytes."""

    document: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, tuple[int, ...], Bytes]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(data) for _, _, data in self.tensors.values())

    def put(self, name: str, tree: Tree) -> None:
        """Add a state; its tensors are copied, since they will change.

        Raises:
            ParameterError: it holds a value other than numbers, texts, tensors and collections of these.
        """
        self.document[name] = self._plain(name, tree, MOST_DEPTH)

    def view(self, name: str, tensor: Any) -> None:
        """Add a tensor under its name; it is not copied, so write the shard before the tensor changes."""
        plain = tensor.cpu().contiguous()
        data = np.ndarray(plain.nbytes, np.uint8, plain.numpy())
        self.tensors[name] = (_NAMES[str(plain.dtype).removeprefix("torch.")], tuple(plain.shape), data)

    def _plain(self, place: str, tree: Tree, depth: int) -> Any:
        if depth == 0:
            raise ParameterError(f"checkpoint: {place[:60]}… is nested too deep")
        if tree is None or type(tree) in (bool, int, str):
            return tree
        if isinstance(tree, float):
            return float(tree) if math.isfinite(tree) else {_KIND: "float", _VALUE: repr(float(tree))}
        if isinstance(tree, (list, tuple)):
            plain = [self._plain(f"{place}/{index}", each, depth - 1) for index, each in enumerate(tree)]
            return plain if isinstance(tree, list) else {_KIND: "tuple", _VALUE: plain}
        if isinstance(tree, Mapping):
            entries = [(key, self._plain(f"{place}/{key}", each, depth - 1)) for key, each in tree.items()]
            if all(type(key) is str for key, _ in entries) and _KIND not in tree:
                return dict(entries)
            return {
                _KIND: "map",
                _VALUE: [[self._plain(place, key, depth - 1), each] for key, each in entries],
            }
        if isinstance(tree, np.generic):
            return self._plain(place, tree.item(), depth)
        return self._tensor(place, tree)

    def _tensor(self, place: str, tree: Any) -> dict[str, Any]:
        is_array = isinstance(tree, np.ndarray)
        dtype = str(getattr(tree, "dtype", type(tree).__name__)).removeprefix("torch.")
        short = _NAMES.get(dtype)
        if short is None or not hasattr(tree, "shape"):
            raise ParameterError(
                f"checkpoint: {place} is a {dtype}: give numbers, texts, None, tensors of real numbers, and lists and "
                "mappings of these"
            )
        name = place
        while name in self.tensors or name == "__metadata__":  # "a" of "b/c", and "a/b" of "c", would collide
            name += "'"
        data = np.frombuffer(np.ascontiguousarray(tree).tobytes(), np.uint8) if is_array else _bytes_of(tree)
        self.tensors[name] = (short, tuple(tree.shape), data)
        return {_KIND: "array" if is_array else "tensor", _VALUE: name}

    def get(self, name: str) -> Tree:
        """Return a state; tensors and arrays are copies, on the CPU.

        Raises:
            ParameterError: it is missing or damaged.
        """
        try:
            return self._tree(self.document[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ParameterError(
                f"the checkpoint is damaged: its state {name!r} cannot be read ({error!r})"
            ) from error

    def _tree(self, plain: Any) -> Tree:
        if isinstance(plain, list):
            return [self._tree(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        kind = plain.get(_KIND)
        if kind is None:
            return {name: self._tree(each) for name, each in plain.items()}
        value = plain[_VALUE]
        if kind == "float":
            return float(value)
        if kind == "tuple":
            return tuple(self._tree(each) for each in value)
        if kind == "map":
            return {self._tree(key): self._tree(each) for key, each in value}
        short, shape, data = self.tensors[value]
        if kind == "array":
            return data.copy().view(TYPES[short]).reshape(shape)
        if kind == "tensor":
            return _tensor_of(data, TYPES[short], shape)
        raise ValueError(f"unknown kind {kind!r}")


def _bytes_of(tensor: Any) -> Bytes:
    """Return a copy of a tensor's bytes."""
    import torch

    plain = tensor.detach().to("cpu", copy=True).contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)


def _tensor_of(data: Bytes, dtype: str, shape: Sequence[int]) -> Any:
    import torch

    if not len(data):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    return torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(tuple(shape))


# ------------------------------------------------------------------------------------------------------------ files
def write(path: Path, shard: Shard, about: Mapping[str, Any]) -> None:
    """Write a shard whole or not at all; `about` is kept with the states.

    Raises:
        StorageError: the file system refuses the write.
    """
    places, begin = {}, 0
    for name, (short, shape, data) in shard.tensors.items():
        places[name] = {"dtype": short, "shape": list(shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    metadata = {"about": _text(about), "states": _text(shard.document)}
    whole = _checksum({"__metadata__": metadata} | places, (data for _, _, data in shard.tensors.values()))
    header = _text({"__metadata__": metadata | {"checksum": whole}} | places).encode()
    header += b" " * (-len(header) % 8)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, _, data in shard.tensors.values():
                file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename: otherwise a crash may leave a name without bytes
        draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _text(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _checksum(header: Mapping[str, Any], parts: Iterable[Bytes]) -> str:
    whole = hashlib.blake2b(_text(header).encode(), digest_size=16)
    for data in parts:
        whole.update(data)
    return whole.hexdigest()


def read(path: Path) -> tuple[Shard, dict[str, Any]]:
    """Return a shard, and the `about` that is kept with its states.

    Raises:
        ParameterError: there is no such file, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        why = (
            "it is nested too deep"
            if isinstance(error, RecursionError)
            else f"{str(error) or type(error).__name__}"
        )
        raise ParameterError(f"cannot read {path}: it is not a checkpoint, or is damaged ({why})") from error


def _read(file: BinaryIO, nbytes: int) -> tuple[Shard, dict[str, Any]]:
    length = int.from_bytes(file.read(8), "little")
    # Compared before reading: eight bytes can claim any amount of memory.
    if nbytes < 8 or length > min(nbytes - 8, HEADER_NBYTES):
        raise ValueError("its header is longer than the file")
    header = json.loads(file.read(length), parse_constant=_refused)
    metadata = header["__metadata__"]
    data = np.fromfile(file, np.uint8)
    tensors, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = _placed(entry, data, end)
        end += len(tensors[name][2])
    if end != len(data):
        raise ValueError(f"{end:,} bytes of tensors, and {len(data):,} in the file")
    checksum = metadata.pop("checksum")
    if _checksum(header, [data]) != checksum:
        raise ValueError("its checksum is wrong")
    about = json.loads(metadata["about"], parse_constant=_refused)
    if not isinstance(about, dict):
        raise TypeError("it does not name its rank")
    return Shard(json.loads(metadata["states"], parse_constant=_refused), tensors), about


def _placed(entry: Mapping[str, Any], data: Bytes, begin: int) -> tuple[str, tuple[int, ...], Bytes]:
    """Return a tensor, if its place follows the previous tensor and matches its shape."""
    short, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (*shape, first, end)):
        raise ValueError("shapes and offsets must be whole numbers")
    if first != begin or end > len(data) or math.prod(shape) * _NBYTES[short] != end - first:
        raise ValueError("a tensor lies outside the file, or its size does not match its shape")
    return short, tuple(shape), data[first:end]


def _refused(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


# ---------------------------------------------------------------------------------------------------------- folders
class Found(NamedTuple):
    """A whole checkpoint: its number of ranks, and its files (one of all ranks, or one per rank)."""

    iteration: int
    ranks: int
    files: list[Path]


_SHARD = re.compile(r"(?P<rank>all|rank-\d{5,7})-of-(?P<ranks>\d{5,8})\.safetensors")


def shard_path(folder: Path, iteration: int, ranks: int, rank: int | None = None) -> Path:
    """Return the file of a rank's shard in a run folder, or (None) the shard of all ranks."""
    name = ALL if rank is None else f"rank-{rank:05d}"
    return folder / FOLDER / f"{iteration:09d}" / f"{name}-of-{ranks:05d}.safetensors"


def whole(folder: Path) -> list[Found]:
    """Return the checkpoints of a run folder that have all their shards, the newest first. Reads no file."""
    found = []
    for place in (folder / FOLDER).glob("[0-9]*"):
        if place.name.isdecimal() and place.is_dir():
            found += _whole(int(place.name), place)
    return sorted(found, reverse=True)


def _whole(iteration: int, place: Path) -> list[Found]:
    by_ranks: dict[int, list[tuple[str, Path]]] = {}
    for path in sorted(place.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if match:
            by_ranks.setdefault(int(match["ranks"]), []).append((match["rank"], path))
    found = []
    for ranks, shards in by_ranks.items():
        if shards[0][0] == ALL:
            found.append(Found(iteration, ranks, [shards[0][1]]))
        elif [name for name, _ in shards] == [f"rank-{rank:05d}" for rank in range(ranks)]:
            found.append(Found(iteration, ranks, [path for _, path in shards]))
    return found


def newest(folder: Path) -> Found:
    """Return the newest whole checkpoint of a run folder.

    Raises:
        ParameterError: it holds no whole checkpoint.
    """
    for found in whole(folder):
        return found
    raise ParameterError(
        f"{folder} holds no complete checkpoint: programs save one by comm.checkpoint(iteration=..., model=...)"
    )


class Part(NamedTuple):
    """A rank's part of a checkpoint: `place` is the prefix of its names in the shard, `donor` the rank that saved it.

    `same` says whether the checkpoint has exactly the ranks of this run.
    """

    shard: Shard
    place: str
    donor: int
    same: bool

    def get(self, name: str) -> Tree:
        """Return one of its states.

        Raises:
            ParameterError: it is missing or damaged.
        """
        return self.shard.get(self.place + name)

    def saved(self) -> Saved:
        """Return the states that its program has saved.

        Raises:
            ParameterError: it is damaged.
        """
        iteration = require_iteration(self.get("iteration"))
        names = ("model", "optimizer", "policy", "extra")
        states = {name: self.get(name) for name in names if self.place + name in self.shard.document}
        return Saved(iteration, **states, donor=self.donor)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(each[2]) for name, each in self.shard.tensors.items() if name.startswith(self.place))


def part_of(found: Found, rank: int, shard: tuple[Shard, dict[str, Any]] | None = None, *, size: int) -> Part:
    """Return the part of a checkpoint for one of `size` ranks: its own, or a saved rank's by number modulo their count.

    If a saved rank's number is not below `size` (it outlived other ranks), the saved ranks are assigned in order.
    `shard` is the shard of all ranks, if it has been read already.

    Raises:
        ParameterError: a file is damaged.
    """
    together = found.files[0].name.startswith(ALL)
    place = 0 if together else rank % found.ranks
    states, about = shard or read(found.files[place])
    # Shards that do not name all ranks come from older versions: they count as shards of ranks that have all survived.
    saved = about.get("ranks" if together else "members", list(range(found.ranks)))
    whole = isinstance(saved, list) and all(type(each) is int and each >= 0 for each in saved)
    if not whole or len(set(saved)) != found.ranks:
        raise ParameterError(f"{found.files[place]} is damaged: it does not name the ranks of its states")
    donor = rank if rank in saved and max(saved) < size else saved[rank % len(saved)]
    same = sorted(saved) == list(range(size))
    if together:
        return Part(states, f"{donor}/", donor, same)
    if saved.index(donor) != place:
        states, _ = read(found.files[saved.index(donor)])
    return Part(states, "", donor, same)


def clocks_s(found: Found) -> dict[int, float]:
    """Return the times of the ranks' clocks at a checkpoint, all of whose files are read.

    Raises:
        ParameterError: a file is damaged, belongs to another rank, or was saved at another time than the rest.
    """
    times: dict[int, float] = {}
    saves = set()
    for place, path in enumerate(found.files):
        about = read(path)[1]
        saves.add(_save_of(found, place, about))
        if len(saves) > 1:
            raise ParameterError(
                f"{path} and {found.files[0].name} were not saved together: remove {path.parent} to continue from the "
                "checkpoint before"
            )
        try:
            times |= {
                int(rank): float(time_s)
                for rank, time_s in zip(about["ranks"], about["clocks_s"], strict=True)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ParameterError(f"{path} is damaged: it does not name its iteration") from error
    return times


def _save_of(found: Found, place: int, about: Mapping[str, Any]) -> Any:
    """Return the number of the collective save call of a shard; None if it lacks one, like the shard of all ranks."""
    path = found.files[place]
    own = {"iteration": found.iteration, "rank": place}
    for name, expected in own.items():
        if name in about and about[name] != expected:
            raise ParameterError(f"{path} is of {name} {str(about[name])[:20]}, not of {expected}")
    save = about.get("save")
    return save if save is None else str(save)


def prune(folder: Path) -> None:
    """Remove all checkpoints older than the `KEPT` newest whole ones."""
    kept = whole(folder)[:KEPT]
    if len(kept) < KEPT:
        return
    for place in (folder / FOLDER).glob("[0-9]*"):
        if place.name.isdecimal() and int(place.name) < kept[-1].iteration:
            shutil.rmtree(place, ignore_errors=True)


def discard(folder: Path, after: int = -1) -> None:
    """Remove all checkpoints of later iterations than `after`."""
    for place in (folder / FOLDER).glob("[0-9]*"):
        if place.name.isdecimal() and int(place.name) > after:
            shutil.rmtree(place, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------- states
def states_of(**named: Any) -> dict[str, Tree]:
    """Return the state dicts of objects by name; None and mappings unchanged."""
    return {
        name: each
        if each is None or isinstance(each, Mapping) or not hasattr(each, "state_dict")
        else each.state_dict()
        for name, each in named.items()
    }


def load(saved: Saved, **named: Any) -> None:
    """Load the saved states into a model, an optimizer and a policy; None is skipped.

    Raises:
        ParameterError: an object has no saved state, or the state does not fit.
    """
    for name, each in named.items():
        if each is None:
            continue
        state = getattr(saved, name)
        if state is None:
            raise ParameterError(
                f"restore({name}=...): the checkpoint holds no {name}, since none was passed when it was saved"
            )
        try:
            each.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ParameterError(f"restore({name}=...): the saved state does not fit: {error}") from error


def require_iteration(iteration: Any) -> int:
    """Return the iteration of a checkpoint; `ParameterError` unless it is a whole number of at least 0."""
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 10**9:
        raise ParameterError(f"checkpoint(iteration={iteration!r}): give a whole number of at least 0")
    return iteration


def streams_state(streams: Any) -> dict[str, Any]:
    """Return the states of a rank's random streams, by purpose."""
    return {purpose: stream.bit_generator.state for purpose, stream in sorted((streams._open or {}).items())}


def set_streams(streams: Any, state: Mapping[str, Any]) -> None:
    """Restore the states of random streams; generators that a program holds already continue from there too."""
    for purpose, each in state.items():
        try:
            streams(purpose).bit_generator.state = each
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ParameterError(f"the checkpoint is damaged: stream {purpose!r}: {error!r}") from error
