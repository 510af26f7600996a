"""A donor's whole state as messages: packed once, in one pass, straight into the memory that is sent.

A snapshot is taken inside a policy call, between two training steps, so it is never a mixture of two versions of a
model. Its memory is used again once it is sent. Tensors on an accelerator cross the bus in one copy, by way of pinned
memory. This room knows states and messages; no communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from spawnsim.policies.compression import Compression
from spawnsim.policies.memory import CPU
from spawnsim.policies.messages import Bytes, Kind, Message, Unreadable, body_at, seal, write_head
from spawnsim.policies.state import Layout, Tensors, assign

Room = Callable[[int], Bytes]  # number of bytes → fresh memory


def device_of(tensors: Tensors) -> torch.device:
    """Return the accelerator on which the first tensor that is on one lies; the CPU if none is."""
    return next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), CPU)


def model_device(model: torch.nn.Module) -> torch.device:
    """Return where the model's first parameter lies."""
    first = next(model.parameters(), None)
    return CPU if first is None else first.device


def room_for(device: torch.device) -> Room:
    """Return what makes memory to send from and receive into: pinned for a GPU, else what numpy has (huge pages)."""
    if device.type != "cuda":
        return lambda nbytes: np.empty(nbytes, np.uint8)
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def lay_out(layout: Layout, memory: torch.Tensor, sources: Tensors, device: torch.device = CPU) -> None:
    """Copy the sources to their places in main memory, shape (nbytes,), uint8; by way of one buffer on the device."""
    if device.type == "cpu":
        assign(layout.views(memory), sources)
    else:
        gathered = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        assign(layout.views(gathered), sources)
        memory.copy_(gathered)
    layout.clear_gaps(memory)


def laid_out(layout: Layout, memory: torch.Tensor, device: torch.device = CPU) -> Tensors:
    """Return the tensors that lie in main memory: as views, or on the device after one copy.

    0-dim ones stay: optimizers want their step counts in main memory.
    """
    views = layout.views(memory)
    if device.type == "cpu":
        return views
    there = layout.views(memory.to(device))
    return {name: there[name] if view.dim() else view for name, view in views.items()}


class Packer:
    """Packs and unpacks states; remembers layouts, so that a model's description is made and read once."""

    def __init__(
        self, part_nbytes: int, *, checksum: bool = False, compression: Compression | None = None
    ) -> None:
        self._part_nbytes, self._checksum = part_nbytes, checksum
        self._compression = compression if compression is not None else Compression()
        self._layout: Layout | None = None
        self._parts: list[Layout] = []
        self._known: dict[bytes, Layout] = {}
        self._made: dict[int, Bytes] = {}  # the memory of the last snapshot, by part

    def pack(
        self,
        live: Tensors,
        round_: int,
        iteration: int,
        *,
        busy: Callable[[Bytes], bool] = lambda memory: True,
    ) -> list[Bytes]:
        """Return the SNAPSHOT messages of the tensors as they are now; `busy` memory is still needed by others."""
        dressed, device = self._compression.dress(live), device_of(live)
        if dressed.layout is not self._layout:
            self._layout, self._made = dressed.layout, {}
            self._parts = dressed.layout.split(self._part_nbytes)
        messages = []
        for index, layout in enumerate(self._parts):
            start = body_at(len(layout.text))
            array = self._memory(index, start + layout.nbytes, device, busy)
            head = Message(Kind.SNAPSHOT, round_, iteration, index, len(self._parts), text=layout.text)
            write_head(array, head)
            lay_out(layout, torch.from_numpy(array[start:]), dressed.sources, device)
            seal(array, len(layout.text), body=self._checksum)
            messages.append(array)
        return messages

    def _memory(self, index: int, nbytes: int, device: torch.device, busy: Callable[[Bytes], bool]) -> Bytes:
        made = self._made.get(index)
        if made is None or busy(made):
            made = self._made[index] = room_for(device)(nbytes)
        return made

    def unpack(self, parts: Sequence[Message], device: torch.device = CPU) -> Tensors:
        """Return the tensors in the parts of one snapshot: views into the messages, where they travelled as they are.

        Raises `UsageError` if they are compressed by a codec that this rank does not know.
        """
        tensors: Tensors = {}
        for part in parts:
            layout = self._known.get(part.text)
            if layout is None:
                layout = self._known[part.text] = Layout.parse(part.text)
            if part.body.size != layout.nbytes:
                raise Unreadable(f"a part of {part.body.size} bytes that describes {layout.nbytes}")
            tensors.update(laid_out(layout, torch.from_numpy(part.body), device))
        try:
            return self._compression.undress(tensors)
        except ValueError as error:
            raise Unreadable(f"a snapshot that cannot be decoded: {error}") from error
