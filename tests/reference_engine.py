"""A plain discrete-event engine: every step of every rank and every arrival is an event, taken in the order of time.

It knows none of the shortcuts of `spawnsim.virtual` and shares no code with it; the two must log the same.
A program is a list of steps: ("compute", s), ("send", dest, tag, nbytes), ("recv", source, tag),
("probe", source, tag), ("irecv", source, tag), ("wait",) for the oldest irecv not waited for. -1 is any source or tag.
With `serial` a receiver's card lets messages in one by one, as the receiver takes them, each in the first gap after its
first byte; with `fifo` in the order in which their first bytes come; with `fair` messages share the up link of their
sender and the down link of their receiver, max-min fairly.
"""

import heapq
from collections import deque

LATENCY, BANDWIDTH, OVERHEAD = 1e-3, 1e6, 1e-6
ANY = -1


class Engine:
    """Runs one program per rank; `logs[rank]` lists (what, source, tag, number, time)."""

    def __init__(self, programs, contention="none"):
        self.contention, self.now = contention, 0.0
        self.card = [0.0] * len(programs)  # when it has let in all that came
        self.booked = [[] for _ in programs]  # when it is busy, as the receiver took messages
        self.drains = {}  # letter -> (arrival, drain), until it is taken
        self.flows, self.since, self.change = [], 0.0, 0
        self.programs = [deque(program) for program in programs]
        self.heap, self.sequence = [], 0
        self.nic = [0.0] * len(programs)
        self.arrived = [[] for _ in programs]  # (source, tag, number), in order of arrival
        self.posted = [[] for _ in programs]  # receives in order: dicts
        self.handles = [deque() for _ in programs]
        self.sent = [0] * len(programs)
        self.logs = [[] for _ in programs]
        for rank in range(len(programs)):
            self.at(0.0, rank, lambda rank=rank: self.step(rank, 0.0))

    def at(self, time, rank, action):
        self.sequence += 1
        heapq.heappush(self.heap, (time, rank, self.sequence, action))

    def run(self):
        while self.heap:
            self.now, _, _, action = heapq.heappop(self.heap)
            action()
        return self.logs

    def step(self, rank, now):
        """Take the next step of a rank, at its time."""
        if self.programs[rank]:
            what, *arguments = self.programs[rank].popleft()
            after = getattr(self, what)(rank, now, *arguments)
            if after is not None:
                self.at(after, rank, lambda: self.step(rank, after))

    def compute(self, rank, now, seconds):
        return now + seconds

    def send(self, rank, now, dest, tag, nbytes):
        letter = (rank, tag, self.sent[rank])
        self.sent[rank] += 1
        if self.contention == "fair":
            self.at(now + LATENCY, dest, lambda: self.begin(rank, dest, letter, nbytes))
            return now
        begin = max(now, self.nic[rank])
        self.nic[rank] = begin + nbytes / BANDWIDTH
        arrival = begin + (LATENCY + nbytes / BANDWIDTH)
        if self.contention == "serial":
            self.drains[letter, dest] = (arrival, nbytes / BANDWIDTH)
        if self.contention == "fifo":
            self.at(begin + LATENCY, dest, lambda: self.let_in(dest, letter, arrival, nbytes / BANDWIDTH))
        else:
            self.at(arrival, dest, lambda: self.arrive(dest, letter, arrival))
        return now

    def let_in(self, dest, letter, arrival, drain):
        """The first byte of a message is at its receiver's card."""
        after = self.card[dest] = max(arrival, self.card[dest] + drain)
        self.at(after, dest, lambda: self.arrive(dest, letter, after))

    def begin(self, rank, dest, letter, nbytes):
        """The first byte of a message is on the shared links."""
        self.drip()
        self.flows.append({"links": (("up", rank), ("down", dest)), "left": float(nbytes), "dest": dest,
                           "letter": letter, "over": False})  # fmt: skip
        self.share()

    def drip(self):
        """Take from every flow what has gone through since the rates last changed."""
        for flow in self.flows:
            flow["left"] -= flow.get("rate", 0.0) * (self.now - self.since)
        self.since = self.now

    def share(self):
        """Raise all rates together; what meets a full link stays there. Then wait for the first to end."""
        room = {link: BANDWIDTH for flow in self.flows for link in flow["links"]}
        going = [flow for flow in self.flows if not flow["over"]]
        open_ = list(going)
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
        if going:
            first = min(going, key=lambda flow: flow["left"] / flow["rate"])
            when, change = self.now + first["left"] / first["rate"], self.change
            self.at(when, first["dest"], lambda: self.end(first) if change == self.change else None)

    def end(self, flow):
        """The last byte of a message is through; it is seen once those sent before it to the same rank are."""
        self.drip()
        flow["over"], flow["rate"] = True, 0.0
        pair = [each for each in self.flows if each["links"] == flow["links"]]
        while pair and pair[0]["over"]:
            first = pair.pop(0)
            self.flows.remove(first)
            self.arrive(first["dest"], first["letter"], self.now)
        self.share()

    def arrive(self, rank, letter, now):
        for receive in self.posted[rank]:
            if fits(receive, letter):
                self.posted[rank].remove(receive)
                receive["letter"], receive["done"] = letter, now
                if receive["waited"]:
                    self.finish(rank, receive, now)
                return
        self.arrived[rank].append(letter)

    def post(self, rank, now, source, tag):
        receive = {"source": source, "tag": tag, "letter": None, "done": now, "waited": False}
        letter = next((each for each in self.arrived[rank] if fits(receive, each)), None)
        if letter is None:
            self.posted[rank].append(receive)
        else:
            self.arrived[rank].remove(letter)
            receive["letter"] = letter
        return receive

    def recv(self, rank, now, source, tag):
        return self.await_(rank, now, self.post(rank, now, source, tag))

    def irecv(self, rank, now, source, tag):
        self.handles[rank].append(self.post(rank, now, source, tag))
        return now

    def wait(self, rank, now):
        return self.await_(rank, now, self.handles[rank].popleft()) if self.handles[rank] else now

    def await_(self, rank, now, receive):
        if receive["letter"] is None:
            receive["waited"] = True
            return None
        after = self.take_in(rank, receive["letter"], now)
        self.log(rank, receive, after)
        return after

    def take_in(self, rank, letter, now):
        """Return when a letter that is taken now is through the card: in the first gap that is long enough."""
        arrival, drain = self.drains.pop((letter, rank), (now, 0.0))
        begin = arrival - drain
        for from_, to in sorted(self.booked[rank]):
            if drain and from_ < begin + drain * (1 - 1e-9) and to > begin + drain * 1e-9:
                begin = to
        if drain:
            self.booked[rank].append((begin, begin + drain))
        return max(now, begin + drain)

    def finish(self, rank, receive, now):
        after = self.take_in(rank, receive["letter"], now)
        self.log(rank, receive, after)
        self.at(after, rank, lambda: self.step(rank, after))

    def log(self, rank, receive, now):
        self.logs[rank].append(("got", *receive["letter"], now))

    def probe(self, rank, now, source, tag):
        seen = any(fits({"source": source, "tag": tag}, letter) for letter in self.arrived[rank])
        self.logs[rank].append(("seen", seen, now))
        return now + OVERHEAD


def fits(receive, letter):
    """Return whether a receive takes a letter."""
    return receive["source"] in (ANY, letter[0]) and receive["tag"] in (ANY, letter[1])
