"""Sequential specifications of objects that ranks share."""


class Ticket:
    def __init__(self):
        self.next = 0

    def take(self):
        self.next += 1
        return self.next - 1
