"""A donor's whole state as messages: packed once, in one pass, straight into the buffers that are sent.

This room knows states and messages; no communicator. A snapshot is taken inside a policy call, between two training
steps, so it is never a mixture of two versions of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spawnsim.policies.messages import Bytes, Kind, Message, Unreadable, body_at, seal, write_head
from spawnsim.policies.state import Layout, Tensors, assign


class Packer:
    """Packs and unpacks states; remembers layouts, so that a model's description is made and read once."""

    def __init__(self, part_nbytes: int, *, checksum: bool = False) -> None:
        self._part_nbytes, self._checksum = part_nbytes, checksum
        self._layout: Layout | None = None
        self._parts: list[Layout] = []
        self._known: dict[bytes, Layout] = {}

    def pack(self, live: Tensors, round_: int, iteration: int) -> list[Bytes]:
        """Return the SNAPSHOT messages of the tensors as they are now."""
        if self._layout is None or not self._layout.matches(live):
            self._layout = Layout.of(live)
            self._parts = self._layout.split(self._part_nbytes)
        messages = []
        for index, layout in enumerate(self._parts):
            start = body_at(len(layout.text))
            array: Bytes = np.empty(start + layout.nbytes, np.uint8)  # numpy takes huge pages where it can
            head = Message(Kind.SNAPSHOT, round_, iteration, index, len(self._parts), text=layout.text)
            write_head(array, head)
            assign(layout.views(torch.from_numpy(array[start:])), live)
            seal(array, len(layout.text), body=self._checksum)
            messages.append(array)
        return messages

    def unpack(self, parts: Sequence[Message]) -> Tensors:
        """Return the tensors in the parts of one snapshot, as views into the messages."""
        tensors: Tensors = {}
        for part in parts:
            layout = self._known.get(part.text)
            if layout is None:
                layout = self._known[part.text] = Layout.parse(part.text)
            if part.body.size != layout.nbytes:
                raise Unreadable(f"a part of {part.body.size} bytes that describes {layout.nbytes}")
            tensors.update(layout.views(torch.from_numpy(part.body)))
        return tensors
