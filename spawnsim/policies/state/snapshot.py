"""Snapshots: a whole state encoded for transport, laid out in flat memory, and decoded again.

`Compression` encodes a state unchanged, cast to a smaller dtype, or through a codec. An encoded tensor has a mark after
its name, so a snapshot describes its own encoding: `name␟float32` was cast from float32, and
`name␟float32␟3,4␟uniform8` had the shape (3, 4) before a codec encoded it. Only float32 and float64 parameters and
buffers are encoded. They stay unchanged if they are not finite, exceed the smaller dtype's range, or would not become
smaller. Optimizer state is never encoded: a second moment that is rounded to 0 makes steps of any size.

A state is laid out in one pass, directly in the memory that is sent or exposed. Tensors on an accelerator cross the bus
in one copy, through pinned memory. Must not know communicators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.state.arithmetic import (
    CPU,
    META,
    as_tensor,
    new_buffer,
    new_memory,
    phantom_memory,
    without_data,
)
from spawnsim.policies.state.codecs import NAMED, Bytes, Codec, Float16, NoCompression, encoded_nbytes, unpack
from spawnsim.policies.state.layout import ALIGN_NBYTES, Entry, Layout, Tensors, assign, layout_of

MARK = "\x1f"  # the unit separator: parameter names do not contain it
SMALLER = {"float16": torch.float16, "bfloat16": torch.bfloat16}
WIDE: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
MARKS_NBYTES = 64  # upper bound of a mark in the description of one tensor, without the codec's name


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A state in transport form: its layout, and the source tensors (in their own dtypes, by marked name)."""

    layout: Layout
    sources: Tensors


class Compression:
    """One rank's setting: None, "float16", "bfloat16", another codec's name, or a codec. Caches its layout."""

    __slots__ = ("_layout", "codec", "name", "small")

    def __init__(self, how: str | Codec | None = None) -> None:
        codec = _known_codec(how)
        self.small = SMALLER.get(codec) if isinstance(codec, str) else None
        self.codec = None if isinstance(codec, str) else codec
        self.name = codec if isinstance(codec, str) else name_of(codec)
        self._layout: Layout | None = None

    def encode(self, live: Tensors) -> EncodedState:
        """Return the encoded state; tensors that travel unchanged or cast are not copied yet."""
        if self.name:
            sources, entries = self._changed(live)
            if self._layout is None or set(self._layout.entries) != set(entries):
                self._layout = layout_of(tuple(entries))
            return EncodedState(self._layout, sources)
        if self._layout is None or not self._layout.matches(live):
            self._layout = Layout.of(live)
        return EncodedState(self._layout, live)

    def _changed(self, live: Tensors) -> tuple[Tensors, list[Entry]]:
        # A second moment that is rounded to 0 makes steps of any size, so optimizer state is not encoded.
        changing = {n: t for n, t in live.items() if t.dtype in WIDE and not n.startswith("optimizer/")}
        limit = torch.finfo(self.small or torch.float32).max  # codecs decode to float32
        # A value beyond the limit would become infinite, so its whole tensor travels unchanged.
        fitting = {name for name, largest in _magnitudes(changing) if largest <= limit}
        sources: Tensors = {}
        entries = []
        for name, tensor in live.items():
            source, dtype = tensor, tensor.dtype
            if name in fitting and self.small is not None:
                name, dtype = f"{name}{MARK}{str(tensor.dtype)[6:]}", self.small
            elif name in fitting and self.codec is not None:
                name, source = self._encoded(name, tensor)
                dtype = source.dtype
            sources[name] = source
            entries.append(Entry(name, dtype, tuple(source.shape)))
        return sources, entries

    def _encoded(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        assert self.codec is not None
        flat = tensor.detach().reshape(-1)
        if without_data(flat):
            body = phantom_memory(encoded_nbytes(self.codec, flat.numel()))
        else:
            body = self.codec.encode(flat.cpu().numpy())
        # For small tensors, the codec's table alone may be larger than the values.
        if body.nbytes >= tensor.nbytes:
            return name, tensor
        shape = ",".join(map(str, tensor.shape))
        return MARK.join([name, str(tensor.dtype)[6:], shape, self.name]), as_tensor(body)

    def decode(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a snapshot with their original names, dtypes and shapes, on the same devices.

        Raises `UsageError` for a codec that this rank does not know, ValueError for missing bytes.
        """
        if not any(MARK in name for name in tensors):
            return tensors
        found: Tensors = {}
        cast: list[Entry] = []
        for marked, tensor in tensors.items():
            name, *marks = marked.split(MARK)
            if len(marks) == 3:
                found[name] = self._decoded(marks, tensor)
            else:
                found[name] = tensor
                cast += [Entry(name, getattr(torch, dtype), tuple(tensor.shape)) for dtype in marks]
        return found | _widened(found, cast)

    def _decoded(self, marks: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        dtype, shapes, codec = marks
        shape = tuple(int(size) for size in shapes.split(",") if size)
        if without_data(tensor):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=META)
        body, count = tensor.cpu().numpy(), torch.Size(shape).numel()
        wide = WIDE[getattr(torch, dtype)]
        values = torch.from_numpy(unpack(self._known(codec), body, raw=False, dtype=wide, count=count))
        return values.reshape(shape).to(tensor.device if shape else "cpu")

    def _known(self, name: str) -> Codec:
        if self.codec is not None and name == self.name:
            return self.codec
        if name not in NAMED:
            raise UsageError(
                f"a snapshot is encoded by {name}, which this rank does not know (its own compression: "
                f"{self.name or None}); give all ranks of the group the same compression"
            )
        return NAMED[name]

    def most_nbytes(self, live: Tensors) -> tuple[int, int]:
        """Return the maximum sizes of description and body, for any values of the tensors."""
        plain = Layout.of(live)
        if not self.name:
            return len(plain.text), plain.nbytes
        # The worst case, because a window's memory is allocated once and the values change.
        marks_nbytes = len(live) * (MARKS_NBYTES + len(self.name))
        return len(plain.text) + marks_nbytes, plain.nbytes + 2 * ALIGN_NBYTES


def _known_codec(how: str | Codec | None) -> str | Codec:
    """Return the name of a dtype, a codec, or "" for neither; raise `ParameterError` for an unknown name."""
    if isinstance(how, str) and how not in NAMED and how not in SMALLER:
        choices = ", ".join(dict.fromkeys([*SMALLER, *NAMED]))
        raise ParameterError(f"compression={how!r}: choose one of {choices}, or give a codec")
    if how is None or isinstance(how, NoCompression):
        return ""
    if isinstance(how, Float16):  # here a value out of range is not clipped
        return "float16"
    if isinstance(how, str):
        return how if how in SMALLER else _known_codec(NAMED[how])
    return how


def name_of(codec: Codec) -> str:
    """Return the name of a codec in snapshots: its short name, its representation, or its type."""
    short = next((name for name, known in NAMED.items() if known == codec), None)
    return short or (repr(codec) if hasattr(codec, "__dataclass_fields__") else type(codec).__qualname__)


def _magnitudes(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Yield each tensor's largest magnitude (NaN if it contains NaN); waits for each device once."""
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel() and not without_data(tensor)}
    yield from ((name, 0.0) for name, tensor in tensors.items() if without_data(tensor))
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in filled.items():
        by_device.setdefault(tensor.device, []).append(name)
    for names in by_device.values():
        # Stack the extremes of all tensors before reading them: every single read would wait for the device.
        ends = [end.double() for name in names for end in torch.aminmax(filled[name])]
        largest = torch.stack(ends).abs().view(-1, 2).amax(1)
        yield from zip(names, largest.tolist(), strict=True)


def _widened(tensors: Tensors, cast: Sequence[Entry]) -> Tensors:
    """Return cast tensors in their original dtypes; on the CPU in one new buffer, with huge pages."""
    there = {e.name: tensors[e.name].to(e.dtype) for e in cast if tensors[e.name].device.type != "cpu"}
    layout = Layout(entry for entry in cast if entry.name not in there)
    here = layout.views(new_buffer(layout.nbytes, torch.uint8, CPU))
    assign(here, tensors)
    return here | there


Allocator = Callable[[int], Bytes]  # number of bytes → fresh memory


def device_of(tensors: Tensors) -> torch.device:
    """Return the device of the first tensor on an accelerator; the CPU if all are on the CPU."""
    return next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), CPU)


def model_device(model: torch.nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    first = next(model.parameters(), None)
    return CPU if first is None else first.device


def allocator_for(device: torch.device) -> Allocator:
    """Return an allocator of memory for messages: pinned for a GPU, else from numpy (huge pages)."""
    if device == META:
        return phantom_memory
    if device.type != "cuda":
        return new_memory
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def lay_out(layout: Layout, memory: torch.Tensor, sources: Tensors, device: torch.device = CPU) -> None:
    """Copy the sources to their places in main memory, uint8 (nbytes,); from a device through one buffer there."""
    if device == META:
        return
    if device.type == "cpu":
        assign(layout.views(memory), sources)
    else:
        gathered = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        assign(layout.views(gathered), sources)
        memory.copy_(gathered)
    # Gaps travel too, and uninitialized bytes there would change the digest from run to run.
    layout.clear_gaps(memory)


def laid_out(layout: Layout, memory: torch.Tensor, device: torch.device = CPU) -> Tensors:
    """Return the tensors of a layout in main memory: as views, or on the device after one copy.

    0-dim tensors stay in main memory, as optimizers require for their step counts.
    """
    views = layout.views(memory)
    if device.type == "cpu" or without_data(memory):
        return views
    there = layout.views(memory.to(device))
    return {name: there[name] if view.dim() else view for name, view in views.items()}
