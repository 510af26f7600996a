"""A plain discrete-event engine: every step of every rank and every arrival is an event, taken in the order of time.

It knows none of the shortcuts of `spawnsim.virtual` and shares no code with it; the two must log the same. A program is
a list of steps per rank, each a name and its arguments, as the methods of `Rank` below take them. Ranks, sources and
destinations are those of the communicator; -1 is any source or any tag.

At equal times arrivals come first, in the order of their senders, then ranks in order, then the data of rendezvous that
may start, in the order sent, then deadlines.
Contention: with "serial" a receiver's card lets messages in one by one, as the receiver takes them, each in the first
gap after its first byte; with "fifo" in the order in which their first bytes come; with "fair" messages share the up
link of their sender and the down link of their receiver, max-min fairly.
"""

import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

ANY = -1
NETWORK, RANKS, LATE = range(3)  # what comes first at equal times


@dataclass(frozen=True)
class Net:
    """What messages cost. `eager_bytes` is the longest message that does not ask first."""

    latency: float = 1e-3
    bandwidth: float = 1e6
    call: float = 1e-6  # what a look costs: a probe, a test, a cancel
    send: float = 0.0  # what a send costs its processor, and a receive its own
    receive: float = 0.0
    eager_bytes: int = 1 << 30
    contention: str = "none"


@dataclass(eq=False)
class Letter:
    """A message. `there` says when its data are at the receiver; None: not known."""

    comm: int
    source: int
    tag: int
    number: int  # of its sender's messages
    origin: int  # world rank of its sender
    dest: int  # world rank of its receiver
    nbytes: int
    envelope: float = 0.0
    there: float | None = None
    drain: float = 0.0
    sender: object = None  # a send that waits for the match
    rendezvous: bool = False
    receive: object = None


@dataclass(eq=False)
class Request:
    """A send or a receive; `end` is when it is complete, as far as that is known."""

    kind: str
    comm: int = 0
    source: int = ANY
    tag: int = ANY
    posted: float = 0.0
    letter: Letter | None = None
    end: float | None = None
    cancelled: bool = False

    def fits(self, letter):
        return self.source in (ANY, letter.source) and self.tag in (ANY, letter.tag)


class Engine:
    """Runs one program per rank; `logs[rank]` lists what the rank saw, the time last."""

    def __init__(self, programs, net=Net(), comms=None):
        self.net, self.now = net, 0.0
        self.comms = comms or [tuple(range(len(programs)))]  # world ranks of each, in order
        self.heap, self.sequence = [], 0
        self.ranks = [Rank(self, me, program) for me, program in enumerate(programs)]
        self.shared = Shared(self) if net.contention == "fair" else None
        for rank in self.ranks:
            rank.go_at(0.0)

    def at(self, time, order, action):
        self.sequence += 1
        heapq.heappush(self.heap, (time, *order, *(0,) * (4 - len(order)), self.sequence, action))

    def run(self):
        while self.heap:
            self.now, *_, action = heapq.heappop(self.heap)
            action()
        return [rank.log for rank in self.ranks]

    # -- the network -----------------------------------------------------------------------------------------

    def leave(self, letter, now):
        """A message, or the request to send it, leaves its sender."""
        net, origin = self.net, self.ranks[letter.origin]
        if letter.origin == letter.dest:
            return self.on_the_way(letter, now, now, 0.0)
        wire = 0 if letter.rendezvous else letter.nbytes
        if self.shared:
            return self.shared.begin(
                now + net.latency, letter, 0 if letter.rendezvous else letter.nbytes, data=False
            )
        begin = max(now, origin.nic)
        origin.nic = begin + wire / net.bandwidth
        return self.on_the_way(
            letter, begin, begin + (net.latency + wire / net.bandwidth), wire / net.bandwidth
        )

    def on_the_way(self, letter, begin, arrival, drain):
        """It arrives as computed, but not before an earlier one of its sender."""
        if self.net.contention == "fifo" and drain:
            letter.drain = 0.0
            self.at(arrival - drain, (NETWORK, letter.dest, letter.origin, letter.number),
                    lambda: self.let_in(letter, arrival, drain))  # fmt: skip
            return
        if not letter.rendezvous:
            letter.there, letter.drain = arrival, drain if self.net.contention == "serial" else 0.0
        if self.net.contention == "fifo":  # one before it may still be on its way to the card
            order = (NETWORK, letter.dest, letter.origin, letter.number)
            self.at(arrival, order, lambda: self.announce(letter, arrival))
        else:
            self.announce(letter, arrival)

    def let_in(self, letter, arrival, drain):
        """The first byte of a message is at a card that takes one after the other."""
        dest = self.ranks[letter.dest]
        dest.card = after = max(arrival, dest.card + drain)
        if letter.envelope:  # the data of a rendezvous
            self.land(letter, after)
        else:
            letter.there = after
            self.announce(letter, after)

    def announce(self, letter, envelope):
        """The envelope will be there; then it may match."""
        dest = self.ranks[letter.dest]
        pair = letter.comm, letter.source
        letter.envelope = dest.last[pair] = max(envelope, dest.last[pair])
        if letter.there is not None:
            letter.there = max(letter.there, letter.envelope)
        order = (NETWORK, letter.dest, letter.source, letter.number)
        self.at(letter.envelope, order, lambda: dest.arrive(letter))

    def meet(self, letter, receive):
        """Message and receive have met: whoever waits for that at the sender hears of it one latency later."""
        receive.letter, letter.receive = letter, receive
        sender, letter.sender = letter.sender, None
        if letter.there is not None:
            receive.end = max(receive.posted, letter.there) + self.overhead(letter, self.net.receive)
        back = self.now + (0.0 if letter.origin == letter.dest else self.net.latency)
        if sender is not None and not letter.rendezvous:
            sender.end = back
            self.ranks[letter.origin].stir()
        elif sender is not None:
            self.at(back, (LATE, -1, letter.origin, letter.number), lambda: self.stream(letter, sender))

    def overhead(self, letter, seconds):
        return 0.0 if letter.origin == letter.dest else seconds

    def stream(self, letter, sender):
        """The data of a rendezvous leave, on a lane of their own."""
        net, origin = self.net, self.ranks[letter.origin]
        seconds = letter.nbytes / net.bandwidth
        if self.shared and letter.origin != letter.dest:
            self.shared.begin(self.now + net.latency, letter, letter.nbytes, data=sender)
            return
        if letter.origin == letter.dest:
            sender.end = self.now
            origin.stir()
            self.land(letter, self.now)
            return
        begin = max(self.now, origin.bulk)
        origin.bulk = sender.end = begin + seconds
        origin.stir()
        arrival = begin + (net.latency + seconds)
        if net.contention == "fifo" and seconds:
            self.at(arrival - seconds, (NETWORK, letter.dest, letter.origin, letter.number),
                    lambda: self.let_in(letter, arrival, seconds))  # fmt: skip
        else:
            letter.drain = seconds if net.contention == "serial" else 0.0
            self.land(letter, arrival)

    def land(self, letter, arrival):
        """It is known when the data of a rendezvous arrive."""
        letter.there = arrival
        if letter.receive is not None:
            letter.receive.end = max(letter.receive.posted, arrival) + self.overhead(letter, self.net.receive)
            self.ranks[letter.dest].stir()


class Shared:
    """Links that messages share: rates are raised together until a link is full; what meets it stays there."""

    def __init__(self, engine):
        self.engine, self.flows, self.since, self.change = engine, [], 0.0, 0
        self.lanes = defaultdict(deque)

    def begin(self, when, letter, nbytes, data):
        order = (NETWORK, -1, letter.origin, letter.number)
        flow = {"links": (("up", letter.origin), ("down", letter.dest)), "left": float(nbytes), "letter": letter,
                "data": data, "over": False}  # fmt: skip
        if data is False:
            self.lanes[letter.comm, letter.origin, letter.dest].append(flow)
        self.engine.at(when, order, lambda: self.start(flow))

    def start(self, flow):
        self.drip()
        self.flows.append(flow)
        self.share()

    def drip(self):
        """Take from every flow what has gone through since the rates last changed."""
        for flow in self.flows:
            flow["left"] -= flow.get("rate", 0.0) * (self.engine.now - self.since)
        self.since = self.engine.now

    def share(self):
        bandwidth = self.engine.net.bandwidth
        room = {link: bandwidth for flow in self.flows for link in flow["links"]}
        open_ = [flow for flow in self.flows if flow["left"] > 0]
        going = list(open_)
        while open_:
            users = {link: sum(link in flow["links"] for flow in open_) for link in room}
            level = min(room[link] / n for link, n in users.items() if n)
            full = {link for link, n in users.items() if n and room[link] / n <= level * (1 + 1e-12)}
            done = [flow for flow in open_ if full & set(flow["links"])]
            for flow in done:
                flow["rate"] = level
                for link in flow["links"]:
                    room[link] -= level
            open_ = [flow for flow in open_ if flow not in done]
        self.change += 1
        for flow in [flow for flow in self.flows if flow["left"] <= 0]:
            self.end(flow)
        if going:
            first = min(going, key=lambda flow: flow["left"] / flow["rate"])
            when, change = self.engine.now + first["left"] / first["rate"], self.change
            self.engine.at(when, (NETWORK, -1, -1), lambda: self.over(first, change))

    def over(self, flow, change):
        if change == self.change:
            self.drip()
            flow["left"] = 0.0
            self.share()

    def end(self, flow):
        """The last byte is through; a message is seen once those sent before it to the same rank are."""
        engine, letter = self.engine, flow["letter"]
        self.flows.remove(flow)
        flow["over"] = True
        if flow["data"] is not False:
            flow["data"].end = engine.now
            engine.ranks[letter.origin].stir()
            engine.land(letter, engine.now)
            return
        lane = self.lanes[letter.comm, letter.origin, letter.dest]
        while lane and lane[0]["over"]:
            first = lane.popleft()["letter"]
            first.there = None if first.rendezvous else engine.now
            engine.announce(first, engine.now)


@dataclass(eq=False)
class Rank:
    """One rank: its program, a generator that yields the time at which it goes on, or None to be stirred."""

    engine: Engine
    me: int
    program: list
    log: list = field(default_factory=list)
    nic: float = 0.0  # when the next message may leave
    bulk: float = 0.0  # likewise for the data of rendezvous
    card: float = -math.inf  # when it has let in all that came ("fifo")

    def __post_init__(self):
        self.booked, self.last = [], defaultdict(float)  # the card's intervals ("serial"); last envelopes
        self.arrived, self.posted = defaultdict(list), defaultdict(list)  # by communicator
        self.requests, self.sent, self.waiting, self.turn = [], 0, False, 0
        self.body = self.steps()

    def go(self, turn):
        """Run until the program waits: for a time, or to be stirred."""
        if turn != self.turn:
            return  # stirred meanwhile
        self.turn += 1
        self.waiting = False
        until = next(self.body, math.inf)
        if until is None:
            self.waiting = True
        elif until < math.inf:
            self.go_at(until)

    def go_at(self, time):
        turn = self.turn
        self.engine.at(time, (RANKS, self.me), lambda: self.go(turn))

    def stir(self):
        """Something has changed that the rank may wait for."""
        if self.waiting:
            self.waiting = False
            self.go_at(self.engine.now)

    def steps(self):
        for what, *arguments in self.program:
            yield from getattr(self, what)(*arguments)

    def note(self, *entry):
        self.log.append((*entry, self.engine.now))

    # -- the steps -------------------------------------------------------------------------------------------

    def compute(self, seconds):
        yield self.engine.now + seconds

    sleep = compute

    def send(self, comm, dest, tag, nbytes, mode="standard", deadline=math.inf):
        request = yield from self.start_send(comm, dest, tag, nbytes, mode)
        yield from self.finish(request, deadline)

    def isend(self, comm, dest, tag, nbytes, mode="standard"):
        self.requests.append((yield from self.start_send(comm, dest, tag, nbytes, mode)))

    def recv(self, comm, source, tag, deadline=math.inf):
        request = self.post(comm, source, tag)
        yield from self.finish(request, deadline, withdraw=True)

    def irecv(self, comm, source, tag):
        self.requests.append(self.post(comm, source, tag))
        yield self.engine.now

    def iprobe(self, comm, source, tag):
        self.note("seen", self.find(comm, source, tag) is not None)
        yield self.engine.now + self.engine.net.call

    def probe(self, comm, source, tag):
        """Wait for a message that fits, and look at it."""
        while self.find(comm, source, tag) is None:
            yield None
        letter = self.find(comm, source, tag)
        yield self.engine.now + self.engine.net.call
        self.note("probed", letter.source, letter.tag, letter.nbytes)

    def mprobe(self, comm, source, tag):
        """Wait for a message that fits, and receive that one."""
        while self.find(comm, source, tag) is None:
            yield None
        letter = self.find(comm, source, tag)
        self.arrived[comm].remove(letter)
        yield self.engine.now + self.engine.net.call
        request = Request("receive", comm, source, tag, self.engine.now)
        self.engine.meet(letter, request)
        yield from self.finish(request)

    def wait(self, index, deadline=math.inf):
        if index < len(self.requests):
            request = self.requests[index]
            if (yield from self.finish(request, deadline)):
                self.requests.remove(request)

    def waitall(self):
        requests, self.requests = self.requests, []
        for request in requests:
            yield from self.finish(request)

    def waitany(self):
        if self.requests:
            over = yield from self.await_some()
            request = self.requests[over[0]]
            del self.requests[over[0]]
            self.report(request)

    def waitsome(self):
        if self.requests:
            over = yield from self.await_some()
            requests = [self.requests[index] for index in over]
            self.requests = [each for each in self.requests if each not in requests]
            for request in requests:
                self.report(request)

    def test(self, index):
        if index < len(self.requests):
            request = self.requests[index]
            over = bool(self.over([request]))
            self.note("over", over)
            yield self.engine.now + self.engine.net.call
            if over:
                self.requests.remove(request)
                self.report(request)

    def cancel(self, index):
        """Cancel the first receive from a position on; then wait for it."""
        receives = [each for each in self.requests[index:] if each.kind == "receive"]
        if receives:
            request = receives[0]
            if request.letter is None:
                self.posted[request.comm].remove(request)
                request.cancelled, request.end = True, self.engine.now + self.engine.net.call
            yield self.engine.now + self.engine.net.call
            yield from self.finish(request)
            self.requests.remove(request)

    # -- what they share -------------------------------------------------------------------------------------

    def start_send(self, comm, dest, tag, nbytes, mode):
        engine = self.engine
        members = engine.comms[comm]
        request = Request("send", comm)
        letter = Letter(comm, members.index(self.me), tag, self.sent, self.me, members[dest], nbytes)
        self.sent += 1
        letter.rendezvous = nbytes > engine.net.eager_bytes and mode != "buffered"
        if letter.rendezvous or mode == "synchronous":
            letter.sender = request
        now = engine.now
        engine.leave(letter, now)
        spent = engine.overhead(letter, engine.net.send)
        if letter.sender is None:
            request.end = now + spent
        yield now + spent
        return request

    def post(self, comm, source, tag):
        request = Request("receive", comm, source, tag, self.engine.now)
        letter = self.find(comm, source, tag)
        if letter is None:
            self.posted[comm].append(request)
        else:
            self.arrived[comm].remove(letter)
            self.engine.meet(letter, request)
        return request

    def find(self, comm, source, tag):
        wanted = Request("look", comm, source, tag)
        return next((letter for letter in self.arrived[comm] if wanted.fits(letter)), None)

    def arrive(self, letter):
        """An envelope is there: the first receive that fits takes it."""
        for request in self.posted[letter.comm]:
            if request.fits(letter):
                self.posted[letter.comm].remove(request)
                self.engine.meet(letter, request)
                break
        else:
            self.arrived[letter.comm].append(letter)
        self.stir()

    def finish(self, request, deadline=math.inf, withdraw=False):
        """Wait for one request; False if the deadline came first."""
        due = self.engine.now + deadline
        if due < math.inf:
            self.engine.at(due, (LATE, self.me), self.stir)
        while request.end is None and self.engine.now < due:
            yield None
        if request.end is not None and request.end <= due:
            self.take_in(request)
        if request.end is None or request.end > due:
            yield max(due, self.engine.now)
            self.note("timeout")
            if withdraw:
                self.give_up(request)
            return False
        yield max(request.end, self.engine.now)
        self.report(request)
        return True

    def give_up(self, request):
        """Take back a receive; what it has matched is there for the next."""
        letter = request.letter
        if letter is None:
            self.posted[request.comm].remove(request)
            return
        letter.receive = None
        self.arrived[request.comm].append(letter)
        self.arrived[request.comm].sort(key=lambda each: (each.envelope, each.source, each.number))

    def report(self, request):
        if request.cancelled:
            self.note("cancelled")
        elif request.kind == "send":
            self.note("sent")
        else:
            self.note("got", request.letter.source, request.letter.tag, request.letter.number)

    def take_in(self, request):
        """Let what is taken now through the card: in the first gap that is long enough."""
        letter = request.letter
        if letter is None or not letter.drain:
            return
        drain, begin = letter.drain, letter.there - letter.drain
        for from_, to in sorted(self.booked):
            if from_ < begin + drain * (1 - 1e-9) and to > begin + drain * 1e-9:
                begin = to
        self.booked.append((begin, begin + drain))
        letter.there, letter.drain = begin + drain if begin != letter.there - drain else letter.there, 0.0
        request.end = max(request.posted, letter.there) + self.engine.overhead(
            letter, self.engine.net.receive
        )

    def over(self, requests):
        """Return the positions of those that are over, the earliest first."""
        now = self.engine.now
        known = sorted(
            (each.end, i) for i, each in enumerate(requests) if each.end is not None and each.end <= now
        )
        for _, i in known:
            self.take_in(requests[i])
        return [i for end, i in sorted((requests[i].end, i) for _, i in known) if end <= now]

    def await_some(self):
        while True:
            over = self.over(self.requests)
            if over:
                return over
            ends = [each.end for each in self.requests if each.end is not None]
            if ends:
                self.engine.at(min(ends), (RANKS, self.me), self.stir)
            yield None
