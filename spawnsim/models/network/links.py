"""Models of one link between two ranks: Hockney, LogGP, TCP, and models by message size.

Each is a small frozen object that provides pieces: costs that are affine in the size from some size on. Symbols: α
latency, β = 1 / bandwidth; L, o, g, G of LogGP.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from spawnsim.errors import ParameterError
from spawnsim.models.network.cost import Costs


class Piece(NamedTuple):
    """From `from_bytes` on, a message of n bytes costs fixed + n * per_byte, field by field."""

    from_bytes: int
    fixed: Costs
    per_byte: Costs

    def undrained(self) -> Piece:
        """Return the piece for receivers that take in any number of messages at once."""
        return self._replace(
            fixed=self.fixed._replace(drain_s=0.0), per_byte=self.per_byte._replace(drain_s=0.0)
        )


class Link(Protocol):
    """A model of one link."""

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces by rising `from_bytes`, the first from 0."""
        ...

    def farther(self, latency_s: float, share: float = 1.0) -> Self: ...


def at_least(value: float, least: float, what: str, *, above: bool = False) -> float:
    """Return `value` if it is a finite number of at least (or above) `least`, else raise `ParameterError`."""
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ParameterError(
            f"{what}={value}: give a finite number {'above' if above else 'of at least'} {least:g}"
        )
    return value


def bandwidth_Bps(link: Link) -> float:
    """Return the bandwidth of a link for long messages, in bytes per second."""
    per_byte_s = float(link.pieces()[-1].per_byte.flight_s)
    if not per_byte_s > 0.0:
        raise ParameterError('contention="fair" needs a link whose long messages take time per byte')
    return 1.0 / per_byte_s


def evaluate(pieces: tuple[Piece, ...], nbytes: float) -> Costs:
    """Return the cost of one message of `nbytes` bytes."""
    at = bisect_right(pieces, nbytes, key=lambda p: p.from_bytes) - 1 if len(pieces) > 1 else 0
    _, fixed, per_byte = pieces[at]
    return Costs(*[constant + nbytes * slope for constant, slope in zip(fixed, per_byte, strict=True)])


@dataclass(frozen=True, slots=True)
class Hockney:
    """Hockney's model: T(n) = α + nβ; the sender's NIC is busy for nβ, processors are free.

    Args:
        latency_s: α, seconds.
        bandwidth_Bps: 1/β, bytes per second.
        overlap: False for the telephone model of textbook formulas: a NIC is busy for all of α + nβ.
        serial_receive: Admit messages that meet at one receiver one by one.

    Raises:
        ParameterError: The latency is negative or the bandwidth not above 0.

    R. W. Hockney, Parallel Computing 20 (1994) 389-398.
    """

    latency_s: float
    bandwidth_Bps: float  # noqa: N815
    overlap: bool = True
    serial_receive: bool = True

    def __post_init__(self) -> None:
        at_least(self.latency_s, 0.0, "latency_s")
        at_least(self.bandwidth_Bps, 0.0, "bandwidth_Bps", above=True)

    def pieces(self) -> tuple[Piece, ...]:
        """Return the one piece."""
        # With overlap the NIC is busy while bytes pass through it, and latency is time on the wire. Without overlap,
        # it is busy until the message has arrived, as the closed forms of textbooks assume.
        alpha, beta = self.latency_s, 1.0 / self.bandwidth_Bps
        busy = 0.0 if self.overlap else alpha
        into = self.serial_receive
        fixed = Costs(0.0, busy, alpha, 0.0, busy * into)
        return (Piece(0, fixed, Costs(0.0, beta, beta, 0.0, beta * into)),)

    def farther(self, latency_s: float, share: float = 1.0) -> Hockney:
        return replace(self, latency_s=self.latency_s + latency_s, bandwidth_Bps=self.bandwidth_Bps * share)


@dataclass(frozen=True, slots=True)
class LogGP:
    """LogGP: T(n) = L + 2o + (n-1)G; the next message may start after max(g, o) + (n-1)G.

    Args:
        L: Latency of the wire, seconds.
        o: Overhead of the processor at either end, seconds.
        g: Gap between messages, seconds.
        G: Gap per byte, seconds.
        serial_receive: Admit messages that meet at one receiver one by one, a gap apart.

    Raises:
        ParameterError: A value is negative.

    A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman, SPAA 1995. An empty message costs as much as one byte.
    """

    L: float
    o: float
    g: float
    G: float
    serial_receive: bool = True

    def __post_init__(self) -> None:
        for name in "LogG":
            at_least(getattr(self, name), 0.0, name)

    def pieces(self) -> tuple[Piece, ...]:
        """Return two pieces: for the empty message, and for all other sizes."""
        # The receiver's o is its processor's (receive_s), not part of the flight. A message of n bytes costs (n-1)G,
        # so an affine piece would give the empty message -G: it has its own piece, equal to one byte's.
        gap, flight, into = max(self.g, self.o), self.o + self.L, self.serial_receive
        empty = Costs(self.o, gap, flight, self.o, gap * into)
        first = Costs(self.o, gap - self.G, flight - self.G, self.o, (gap - self.G) * into)
        return (
            Piece(0, empty, Costs(0.0, 0.0, 0.0, 0.0, 0.0)),
            Piece(1, first, Costs(0.0, self.G, self.G, 0.0, self.G * into)),
        )

    def farther(self, latency_s: float, share: float = 1.0) -> LogGP:
        return replace(self, L=self.L + latency_s, G=self.G / share)


FRAME_BYTES = 78  # per segment, in addition to its data: Ethernet 38 with preamble and gap, IPv4 20, TCP 20


@dataclass(frozen=True, slots=True)
class Tcp:
    """A TCP connection: T(n) = α + n/G + stalls, with goodput G below the line's rate, and slow start.

    Segments of M bytes of data take M + 78 bytes on an Ethernet line, so at most G = B·M/(M + 78). A window W allows
    W/RTT; losses at a rate p allow M/RTT·sqrt(3/(2p)) (Mathis et al., 1997). The least of the three is G.

    With an initial window of w segments, a message is sent in windows of wM, 2wM, 4wM, … bytes; behind the k-th the
    sender stalls for M/G + RTT - 2^(k-1)·wM/G, if that is above 0 and bytes remain (Kurose and Ross, Computer
    Networking, "TCP delay modeling", without the handshake). Every message begins this way, as after a connection has
    been idle (RFC 5681, section 4.1). The sender's NIC is busy for n/G.

    Args:
        latency_s: α, seconds one way; the round trip RTT is 2α.
        bandwidth_Bps: B, of the line, bytes per second.
        mss: M, bytes of data in a segment.
        window: The largest window, bytes; None: no limit.
        loss: p, the share of segments that are lost.
        initial_window: w, segments (10 in RFC 6928); None: connections stay open and no message starts slowly.

    Raises:
        ParameterError: The latency or loss is negative, the loss is 1 or more, or another value is not above 0.
    """

    latency_s: float
    bandwidth_Bps: float  # noqa: N815
    mss: int = 1460
    window: int | None = None
    loss: float = 0.0
    initial_window: int | None = None

    def __post_init__(self) -> None:
        at_least(self.latency_s, 0.0, "latency_s")
        at_least(self.bandwidth_Bps, 0.0, "bandwidth_Bps", above=True)
        at_least(self.mss, 1, "mss")
        at_least(1 if self.window is None else self.window, 1, "window")
        at_least(1 if self.initial_window is None else self.initial_window, 1, "initial_window")
        if not 0.0 <= self.loss < 1.0:
            raise ParameterError(f"loss={self.loss}: give a share from 0 up to, not including, 1")

    @property
    def goodput_Bps(self) -> float:
        """Bytes of data a second, once the window is open."""
        rates, trip_s = [self.bandwidth_Bps * self.mss / (self.mss + FRAME_BYTES)], 2.0 * self.latency_s
        if trip_s and self.window is not None:
            rates.append(self.window / trip_s)
        if trip_s and self.loss:
            rates.append(self.mss / trip_s * math.sqrt(1.5 / self.loss))
        return min(rates)

    def pieces(self) -> tuple[Piece, ...]:
        """Return one piece, or with slow start one for each number of stalls."""
        beta, stalls_s = 1.0 / self.goodput_Bps, 0.0
        slope = Costs(0.0, beta, beta, 0.0, beta)
        found = [Piece(0, Costs(0.0, 0.0, self.latency_s, 0.0, 0.0), slope)]
        for sent, stall_s in self._stalls():
            stalls_s += stall_s
            found.append(Piece(sent + 1, Costs(0.0, 0.0, self.latency_s + stalls_s, 0.0, 0.0), slope))
        return tuple(found)

    def _stalls(self) -> Iterator[tuple[int, float]]:
        """Yield the bytes sent before each stall of a slow start, and how long it lasts."""
        beta, sent, window = 1.0 / self.goodput_Bps, 0, self.mss * (self.initial_window or 0)
        while window and (stall_s := self.mss * beta + 2.0 * self.latency_s - window * beta) > 0.0:
            sent, window = sent + window, 2 * window
            yield sent, stall_s

    def slow_start_s(self, nbytes: float) -> float:
        """Return how much longer `nbytes` take on a connection that was idle than on one that was busy.

        A busy connection keeps its window. One that was idle for a retransmission time-out (Linux: 200 ms at least)
        begins again with the initial window.
        """
        return sum(stall_s for sent, stall_s in self._stalls() if nbytes > sent)

    def farther(self, latency_s: float, share: float = 1.0) -> Tcp:
        return replace(self, latency_s=self.latency_s + latency_s, bandwidth_Bps=self.bandwidth_Bps * share)


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A model by message size: `steps` holds (from_bytes, link), the first from 0 bytes on.

    This is how a calibration represents an eager and a rendezvous protocol, or caches and memory.

    Raises:
        ParameterError: No step, the first not from 0, or sizes that do not rise.
    """

    steps: tuple[tuple[int, Link], ...]

    def __post_init__(self) -> None:
        sizes = [from_bytes for from_bytes, _ in self.steps]
        if not sizes or sizes[0] != 0 or sizes != sorted(set(sizes)):
            raise ParameterError(f"steps from {sizes} bytes: begin with 0 and let the sizes rise")

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of all steps, each within its own range of sizes."""
        # A link's own pieces are cut to the range of its step: the piece that holds the first size of the range begins
        # there.
        ends: list[float] = [from_bytes for from_bytes, _ in self.steps[1:]]
        found: list[Piece] = []
        for (begin, link), end in zip(self.steps, [*ends, math.inf], strict=True):
            inside = [piece for piece in link.pieces() if piece.from_bytes < end]
            first = max(i for i, piece in enumerate(inside) if piece.from_bytes <= begin)
            found += [piece._replace(from_bytes=max(begin, piece.from_bytes)) for piece in inside[first:]]
        return tuple(found)

    def farther(self, latency_s: float, share: float = 1.0) -> Piecewise:
        """Return the same links with more latency and this share of their bandwidth."""
        return Piecewise(tuple((n, link.farther(latency_s, share)) for n, link in self.steps))
