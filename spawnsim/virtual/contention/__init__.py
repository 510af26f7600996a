"""What happens to messages that meet on their way to a rank: in turn ("fifo"), or sharing the links ("fair").

Networks whose contention is "serial" or "none" need neither: see `virtual.card`.

This room knows messages, mailboxes and networks' costs. It must not know buffers or communicators' calls.
"""

from __future__ import annotations

from spawnsim.virtual.clockwork import Clockwork
from spawnsim.virtual.contention.ingress import Ingress
from spawnsim.virtual.contention.model import Bulk, Model
from spawnsim.virtual.contention.sharing import Sharing
from spawnsim.virtual.network import Network

__all__ = ["Bulk", "Ingress", "Model", "Sharing", "model_of"]


def model_of(env: Clockwork, network: Network, ranks: int) -> Model | None:
    """Return the model that a network asks for; None: messages do not meet."""
    if network.contention == "fair":
        return Sharing(env, network, ranks)
    return Ingress(env, network) if network.contention == "fifo" else None
