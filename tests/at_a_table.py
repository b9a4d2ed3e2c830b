"""All-reduce between threads of one process: the sum in worker order, ready when all have asked; asking never waits."""

import random
import threading
import time

from armillary.plans import AllReduce
from side_by_side import side_by_side

__all__ = ["Table", "at_a_table"]


class Table:
    def __init__(self, workers):
        self.workers, self.asked, self.changed = workers, {}, threading.Condition()

    def of(self, rank):
        return Seat(self, rank)


class Seat:
    """One thread's place at the table; dawdles by its own dice. events: ("sent" or "waited", label), in order."""

    def __init__(self, table, rank):
        self.table, self.rank, self.number, self.dice = table, rank, 0, random.Random(rank)
        self.events = []

    def start(self, request, label):
        assert isinstance(request, AllReduce)
        time.sleep(self.dice.random() * 0.001)
        number, table = self.number, self.table
        self.number += 1
        self.events.append(("sent", label))
        with table.changed:
            table.asked.setdefault(number, {})[self.rank] = (label, request.tensor.clone())
            table.changed.notify_all()

        def wait():
            with table.changed:
                assert table.changed.wait_for(lambda: len(table.asked[number]) == table.workers, 20), f"{label} hangs"
                shares = [table.asked[number][rank] for rank in range(table.workers)]
            assert len({name for name, _ in shares}) == 1, f"ranks out of order: {shares}"
            self.events.append(("waited", label))
            return sum(flat for _, flat in shares)

        return wait


def at_a_table(workers, act):
    """act(rank, seat) in as many threads; their answers in rank order. The first error is raised."""
    table = Table(workers)
    return side_by_side(workers, lambda rank: act(rank, table.of(rank)))
