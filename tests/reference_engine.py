"""A plain discrete-event engine: every step of every rank and every arrival is an event, taken in the order of time.

It knows none of the shortcuts of `spawnsim.virtual` and shares no code with it; the two must log the same.
A program is a list of steps: ("compute", s), ("send", dest, tag, nbytes), ("recv", source, tag),
("probe", source, tag), ("irecv", source, tag), ("wait",) for the oldest irecv not waited for. -1 is any source, any tag.
"""

import heapq
from collections import deque

LATENCY, BANDWIDTH, OVERHEAD = 1e-3, 1e6, 1e-6
ANY = -1


class Engine:
    """Runs one program per rank; `logs[rank]` lists (what, source, tag, number, time)."""

    def __init__(self, programs):
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
            heapq.heappop(self.heap)[3]()
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
        begin = max(now, self.nic[rank])
        self.nic[rank] = begin + nbytes / BANDWIDTH
        arrival = begin + (LATENCY + nbytes / BANDWIDTH)
        letter = (rank, tag, self.sent[rank])
        self.sent[rank] += 1
        self.at(arrival, dest, lambda: self.arrive(dest, letter, arrival))
        return now

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
        self.log(rank, receive, now)
        return now

    def finish(self, rank, receive, now):
        self.log(rank, receive, now)
        self.at(now, rank, lambda: self.step(rank, now))

    def log(self, rank, receive, now):
        self.logs[rank].append(("got", *receive["letter"], now))

    def probe(self, rank, now, source, tag):
        seen = any(fits({"source": source, "tag": tag}, letter) for letter in self.arrived[rank])
        self.logs[rank].append(("seen", seen, now))
        return now + OVERHEAD


def fits(receive, letter):
    """Return whether a receive takes a letter."""
    return receive["source"] in (ANY, letter[0]) and receive["tag"] in (ANY, letter[1])
