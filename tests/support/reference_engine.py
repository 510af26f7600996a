"""A plain discrete-event engine: every step of every rank and every arrival is an event, taken in the order of time.

It knows none of the shortcuts of `spawnsim.virtual` and shares no code with it; the two must log the same. A program is
a list of steps per rank, each a name and its arguments, as the methods of `Rank` below take them. Ranks, sources and
destinations are those of the communicator; any source and any tag have spawnsim's numbers.

At equal times what has waited for the end of a block is served first; then come arrivals, in the order of their
senders, then ranks in order, then the data of rendezvous that may start, in the order sent, then deadlines.
Contention: with "serial" a receiver's card lets messages in one by one, as the receiver takes them, each in the first
gap after its first byte; with "fifo" in the order in which their first bytes come; with "fair" messages share the up
link of their sender and the down link of their receiver, max-min fairly.
Windows: each rank exposes a list of numbers, each of which has a size in bytes. An access is a request that is served
at its target, in the order in which the requests of an origin were sent, and an answer. A target that computes serves
at the end of its block (unless `progress` says otherwise), or later, if a lock keeps the origin out: first come, first
served. Requests and answers pass the cards as messages do; a card lets in requests as they come.
"""

import heapq
import math
from bisect import insort
from collections import defaultdict, deque
from dataclasses import dataclass, field

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG

WAITED, NETWORK, RANKS, LATE = range(
    4
)  # what comes first at equal times; of NETWORK, what is at a card (-1), not there yet
BARRIER = -1  # the communicator of the messages of barriers


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
    progress: str = "poll"
    cells: tuple = ()  # the sizes of the numbers that each rank exposes, in bytes

    def seconds(self, nbytes):
        """Return how long bytes take, rounded as links do it: what comes at one time must do so here, too."""
        return nbytes * (1 / self.bandwidth)


@dataclass(eq=False)
class Letter:
    """A message. `there` says when its data are at the receiver; None: not known."""

    comm: int
    source: int
    tag: int
    number: int  # of the messages that the program has sent
    order: int  # of all that its sender has sent
    origin: int  # world rank of its sender
    dest: int  # world rank of its receiver
    nbytes: int
    envelope: float = 0.0
    there: float | None = None
    drain: float = 0.0
    sender: object = None  # a send that waits for the match
    rendezvous: bool = False
    receive: object = None
    through: bool = False  # its last byte has come over links that are shared


@dataclass(eq=False)
class Request:
    """A send or a receive; `end` is when it is complete, as far as that is known."""

    kind: str
    comm: int = 0
    source: int = ANY_SOURCE
    tag: int = ANY_TAG
    posted: float = 0.0
    letter: Letter | None = None
    end: float | None = None
    cancelled: bool = False
    drain: float = 0.0  # how long the answer of an access has yet to keep the card busy
    read: tuple | None = None  # what it brings
    reported: bool = True  # by the flush that waits for it

    def fits(self, letter):
        return self.source in (ANY_SOURCE, letter.source) and self.tag in (ANY_TAG, letter.tag)


@dataclass(eq=False)
class Access:
    """A one-sided access on its way. `serve` takes the target's memory and returns what the answer brings."""

    origin: int
    target: int
    back: int  # the bytes of the answer
    serve: object
    request: Request | None = None  # which waits for the answer; None: there is none
    lock: str = ""  # "alone" or "shared": it is over when the lock is held
    here: bool = False


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
            return self.shared.send(letter, wire)
        begin = max(now, origin.nic)
        seconds = net.seconds(wire)
        origin.nic = begin + seconds
        return self.on_the_way(letter, begin, begin + (net.latency + seconds), seconds)

    def on_the_way(self, letter, begin, arrival, drain):
        """It arrives as computed, but not before an earlier one of its sender."""
        key = NETWORK, -1, letter.origin, letter.order
        if self.net.contention == "fifo" and drain:
            letter.drain = 0.0
            self.at(arrival - drain, key, lambda: self.let_in(letter, arrival, drain))
            return
        if not letter.rendezvous:
            letter.there, letter.drain = arrival, drain if self.net.contention == "serial" else 0.0
        if self.net.contention == "fifo":  # one before it may still be on its way to the card
            self.at(arrival, key, lambda: self.announce(letter, arrival))
        else:
            self.announce(letter, arrival)

    def let_in(self, letter, arrival, drain):
        """The first byte of a message is at a card that takes one after the other."""
        letter.there = self.ranks[letter.dest].queue_up(arrival, drain)
        self.announce(letter, letter.there)

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
            self.at(back, (LATE, -1, letter.origin, letter.order), lambda: self.stream(letter, sender))

    def overhead(self, letter, seconds):
        return 0.0 if letter.origin == letter.dest else seconds

    def stream(self, letter, sender):
        """The data of a rendezvous leave."""

        def left(time):
            sender.end = time
            self.ranks[letter.origin].stir()

        def landed(arrival, drain):
            letter.there, letter.drain = arrival, drain
            if letter.receive is not None:
                spent = self.overhead(letter, self.net.receive)
                letter.receive.end = max(letter.receive.posted, arrival) + spent
                self.ranks[letter.dest].stir()

        self.carry((letter.origin, letter.dest, letter.order), letter.nbytes, landed, left)

    def carry(self, key, nbytes, landed, left=lambda time: None):
        """Data of a rendezvous or of an access leave: long ones on a lane of their own.

        `left` is told when they have, `landed` when they are there, and how long they keep the receiver's card busy.
        """
        net, origin, dest = self.net, self.ranks[key[0]], self.ranks[key[1]]
        seconds, lane = net.seconds(nbytes), "bulk" if nbytes > net.eager_bytes else "nic"
        if origin is dest:
            left(self.now)
            landed(self.now, 0.0)
            return
        if self.shared and nbytes:
            self.shared.begin(key, nbytes, lambda: (left(self.now), landed(self.now, 0.0)))
            return
        begin = max(self.now, 0.0 if self.shared else getattr(origin, lane))
        setattr(origin, lane, begin + seconds)
        left(begin + seconds)
        arrival = begin + (net.latency + seconds)
        if net.contention == "fifo" and seconds:
            self.at(arrival - seconds, (NETWORK, -1, origin.me, key[2]),
                    lambda: landed(dest.queue_up(arrival, seconds), 0.0))  # fmt: skip
        else:
            landed(arrival, seconds if net.contention == "serial" else 0.0)

    # -- windows ---------------------------------------------------------------------------------------------

    def ask(self, access, nbytes):
        """The request of an access leaves its origin; it is there after those that were sent before it."""
        origin, target = self.ranks[access.origin], self.ranks[access.target]
        order, waiting = origin.next_order(), target.coming[access.origin]
        waiting.append(access)
        key = NETWORK, access.target, access.origin, order

        def arrive():
            access.here = True
            while waiting and waiting[0].here:
                target.serve_in_time(waiting.popleft())

        def there(arrival, drain):
            end = target.book(arrival, drain)
            self.at(end, key, arrive) if end > arrival else arrive()

        def landed(arrival, drain):
            self.at(arrival, key, (lambda: there(arrival, drain)) if drain else arrive)

        self.carry((access.origin, access.target, order), nbytes, landed)

    def answer(self, access, nbytes):
        """The answer of an access leaves its target."""
        origin, request = self.ranks[access.origin], access.request

        def landed(arrival, drain):
            request.end, request.drain = arrival, drain
            origin.stir()

        self.carry((access.target, access.origin, self.ranks[access.target].next_order()), nbytes, landed)


class Shared:
    """Links that messages share: rates are raised together until a link is full; what meets it stays there."""

    def __init__(self, engine):
        self.engine, self.flows, self.since, self.change = engine, [], 0.0, 0
        self.lanes = defaultdict(deque)

    def begin(self, key, nbytes, through):
        """A flow begins one latency from now; `through` is called when its last byte is there."""
        origin, dest, order = key
        flow = {"links": (("up", origin), ("down", dest)), "left": float(nbytes), "through": through}
        begin = self.engine.now + self.engine.net.latency
        self.engine.at(begin, (NETWORK, -1, origin, order), lambda: self.start(flow))

    def send(self, letter, nbytes):
        """A message is seen once those sent before it to the same rank are."""
        lane = self.lanes[letter.comm, letter.origin, letter.dest]
        lane.append(letter)

        def through():
            letter.through = True
            while lane and lane[0].through:
                first = lane.popleft()
                first.there = None if first.rendezvous else self.engine.now
                self.engine.announce(first, self.engine.now)

        self.begin((letter.origin, letter.dest, letter.order), nbytes, through)

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
            self.flows.remove(flow)
            flow["through"]()
        if going:
            first = min(going, key=lambda flow: flow["left"] / flow["rate"])
            when, change = self.engine.now + first["left"] / first["rate"], self.change
            self.engine.at(when, (NETWORK, -1, -1), lambda: self.over(first, change))

    def over(self, flow, change):
        if change == self.change:
            self.drip()
            flow["left"] = 0.0
            self.share()


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
        self.orders, self.barriers = 0, 0
        self.memory, self.coming = [0] * len(self.engine.net.cells), defaultdict(deque)  # requests, by origin
        self.block = 0.0, 0.0  # computing from, to
        self.alone, self.sharers, self.queue = (
            None,
            set(),
            deque(),
        )  # who holds the lock, and who waits for it
        self.locked, self.all, self.fenced = set(), False, False  # what this rank may access
        self.pending, self.stamps = [], 0  # (target, request) of accesses to be flushed
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

    def next_order(self):
        self.orders += 1
        return self.orders

    # -- the steps -------------------------------------------------------------------------------------------

    def compute(self, seconds):
        self.block = self.engine.now, self.engine.now + seconds
        yield self.block[1]

    def sleep(self, seconds):
        yield self.engine.now + seconds

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

    # -- windows ---------------------------------------------------------------------------------------------

    def lock(self, target, kind):
        if not self.may(target):
            request = yield from self.access(target, 0, 0, lambda memory: None, lock=kind)
            yield from self.await_end(request)
            self.locked.add(target)
            self.note("locked")

    def unlock(self, target):
        if target in self.locked:
            requests = yield from self.complete([target])
            self.locked.remove(target)
            self.engine.ask(Access(self.me, target, 0, None), 0)
            yield self.engine.now + self.spent_on(target)
            self.report(*requests)

    def lock_all(self):
        self.all = self.all or not (self.locked or self.fenced)
        yield self.engine.now

    def unlock_all(self):
        if self.all:
            self.report(*(yield from self.complete()))
            self.all = False

    def fence(self):
        requests = yield from self.complete()
        yield from self.barrier()
        self.report(*requests)
        self.fenced = True
        self.note("fence")

    def flush(self, target):
        if self.may(target):
            self.report(*(yield from self.complete([target])))

    def put(self, target, first, count):
        yield from self.later(target, self.writing(first, count))

    def rput(self, target, first, count):
        yield from self.later(target, self.writing(first, count), requested=True)

    def get(self, target, first, count):
        yield from self.later(target, self.reading(first, count))

    def rget(self, target, first, count):
        yield from self.later(target, self.reading(first, count), requested=True)

    def accumulate(self, target, first, count):
        yield from self.later(target, self.adding(first, count, back=False))

    def swap(self, target, first, count):
        yield from self.later(target, self.adding(first, count, back=True))

    def fetch(self, target, cell):
        """Fetch_and_op: add one to a number."""

        def serve(memory):
            memory[cell] += 1
            return (memory[cell] - 1,)

        yield from self.later(target, (self.size(cell, 1), self.size(cell, 1), serve))

    def compare(self, target, cell, expected):
        """Compare_and_swap: add one to a number if it is what is expected."""

        def serve(memory):
            there = memory[cell]
            memory[cell] = expected + 1 if there == expected else there
            return (there,)

        yield from self.later(target, (2 * self.size(cell, 1), self.size(cell, 1), serve))

    def store(self, first, count):
        self.memory[first : first + count] = [self.stamp()] * count
        yield self.engine.now

    def load(self):
        self.note("load", *self.memory)
        yield self.engine.now

    def sync(self):
        yield self.engine.now + self.engine.net.call

    def may(self, target):
        return self.fenced or self.all or target in self.locked

    def size(self, first, count):
        return sum(self.engine.net.cells[first : first + count])

    def stamp(self):
        """Return a number that nobody has written yet."""
        self.stamps += 1
        return 1000 * self.me + self.stamps

    # Each returns what an access takes: bytes there, bytes back, and what is done at the target.

    def writing(self, first, count):
        stamp = self.stamp()

        def serve(memory):
            memory[first : first + count] = [stamp] * count

        return self.size(first, count), 0, serve

    def reading(self, first, count):
        return 0, self.size(first, count), lambda memory: tuple(memory[first : first + count])

    def adding(self, first, count, back):
        stamp, nbytes = self.stamp(), self.size(first, count)

        def serve(memory):
            there = memory[first : first + count]
            memory[first : first + count] = [each + stamp for each in there]
            return tuple(there) if back else None

        return nbytes, nbytes if back else 0, serve

    def later(self, target, what, requested=False):
        """Begin an access, if there may be any; a flush or its request waits for it."""
        if self.may(target):
            request = yield from self.access(target, *what)
            self.pending.append((target, request))
            if requested:
                request.reported = False
                self.requests.append(request)

    def complete(self, targets=None):
        """Wait for the accesses to some targets, or to all. Return those that are to be reported."""
        requests = [request for to, request in self.pending if targets is None or to in targets]
        self.pending = [each for each in self.pending if each[1] not in requests]
        for request in requests:
            yield from self.await_end(request)
        return [request for request in requests if request.reported]

    def access(self, target, there, back, serve, lock=""):
        request = Request("access", posted=self.engine.now)
        self.engine.ask(Access(self.me, target, back, serve, request, lock), there)
        yield self.engine.now + self.spent_on(target)
        return request

    def spent_on(self, target):
        return 0.0 if target == self.me else self.engine.net.send

    def barrier(self):
        """Dissemination: each round, tell who is twice as far on, and hear from who is as far back.

        A collective sees the card as it is when the rank comes; answers that it sends meanwhile hold up nothing.
        """
        size, card = len(self.engine.ranks), self.nic
        self.barriers += 1
        for away in (1 << k for k in range((size - 1).bit_length())):
            dest = (self.me + away) % size
            letter = Letter(BARRIER, self.me, self.barriers, 0, self.next_order(), self.me, dest, 0)
            letter.there = max(self.engine.now, card) + self.engine.net.latency
            self.engine.announce(letter, letter.there)
            yield self.engine.now + self.engine.net.send
            yield from self.await_end(self.post(BARRIER, (self.me - away) % size, self.barriers))

    # -- what a rank does for others -------------------------------------------------------------------------

    def serve_in_time(self, access):
        """A request is there: it is served now, or when the block ends in whose middle it has come."""
        begin, end = self.block
        if self.engine.net.progress == "poll" and begin < self.engine.now < end:
            self.engine.at(end, (WAITED, self.me), lambda: self.admit(access))
        else:
            self.admit(access)

    def admit(self, access):
        if access.serve is None:
            self.unlocked_by(access.origin)
        elif self.lets_in(access) and (not self.queue or access.origin in (self.alone, *self.sharers)):
            self.serve(access)
        else:
            self.queue.append(access)

    def lets_in(self, access):
        if self.alone is not None:
            return self.alone == access.origin
        return access.lock != "alone" or not self.sharers - {access.origin}

    def serve(self, access):
        if access.lock == "alone":
            self.alone = access.origin
        elif access.lock:
            self.sharers.add(access.origin)
        access.request.read = access.serve(self.memory)
        self.engine.answer(access, access.back)

    def unlocked_by(self, origin):
        if self.alone == origin:
            self.alone = None
        self.sharers.discard(origin)
        while self.queue and self.lets_in(self.queue[0]):
            self.serve(self.queue.popleft())

    def queue_up(self, arrival, drain):
        """Return when the card has let in what would be there at `arrival`, behind all that came before it."""
        self.card = max(arrival, self.card + drain)
        return self.card

    def book(self, arrival, drain):
        """Return when the card has let it in: in the first gap that is long enough."""
        begin = arrival - drain
        for from_, to in self.booked:
            if from_ < begin + drain * (1 - 1e-9) and to > begin + drain * 1e-9:
                begin = to
        insort(self.booked, (begin, begin + drain))
        return begin + drain if begin != arrival - drain else arrival

    # -- what they share -------------------------------------------------------------------------------------

    def start_send(self, comm, dest, tag, nbytes, mode):
        engine = self.engine
        members = engine.comms[comm]
        request = Request("send", comm)
        letter = Letter(
            comm, members.index(self.me), tag, self.sent, self.next_order(), self.me, members[dest], nbytes
        )
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
            self.put_by(letter)
        self.stir()

    def put_by(self, letter):
        """Keep a message that nobody has received: those that come together are in the order of their senders."""
        insort(self.arrived[letter.comm], letter, key=lambda each: (each.envelope, each.source, each.number))

    def finish(self, request, deadline=math.inf, withdraw=False):
        """Wait for one request, and report; False if the deadline came first."""
        due, late = self.engine.now + deadline, []

        def expire():
            late.append(due)
            self.stir()

        if due < math.inf:
            self.engine.at(due, (LATE, self.me), expire)
        if (yield from self.await_end(request, due, late)):
            self.report(request)
            return True
        while not late:
            yield None
        self.note("timeout")
        if withdraw:
            self.give_up(request)
        return False

    def await_end(self, request, due=math.inf, late=()):
        """Wait until a request is over; what it waits for is let in when its last byte could be there.

        False if it is not at `due`. What comes at that very time is in time: `late` is filled when all that has come.
        """
        while request.end is None and not late:
            yield None
        if request.end is None or request.end > due:
            return False
        yield max(request.end, self.engine.now)
        self.take_in(request)
        if request.end > due:
            return False
        yield max(request.end, self.engine.now)
        return True

    def give_up(self, request):
        """Take back a receive; what it has matched is there for the next."""
        letter = request.letter
        if letter is None:
            self.posted[request.comm].remove(request)
            return
        letter.receive = None
        self.put_by(letter)

    def report(self, *requests):
        for request in requests:
            if request.cancelled:
                self.note("cancelled")
            elif request.kind == "access":
                self.pending = [each for each in self.pending if each[1] is not request]
                self.note("done", *(request.read or ()))
            elif request.kind == "send":
                self.note("sent")
            else:
                self.note("got", request.letter.source, request.letter.tag, request.letter.number)

    def take_in(self, request):
        """Let what is taken now through the card: in the first gap that is long enough."""
        letter = request.letter
        if request.drain:
            request.end, request.drain = self.book(request.end, request.drain), 0.0
        elif letter is not None and letter.drain:
            letter.there, letter.drain = self.book(letter.there, letter.drain), 0.0
            spent = self.engine.overhead(letter, self.engine.net.receive)
            request.end = max(request.posted, letter.there) + spent

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
