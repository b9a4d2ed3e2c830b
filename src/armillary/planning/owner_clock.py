"""Ranks without a common clock against a clock: each begins when it may, owners step with one push after another.

A worker's step is a pull of every owner, forward and backward at its own rate, and a push. Its next pull waits behind
its push, since order is kept per pair, and for the bound. Every owner does the same work for a push, so one queue
stands for all. Rates are constant here: what ranks lose by turns, and a bound wins back, no measurement foresees.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from armillary.planning.clock import BusySpan, Simulation, Transfer
from armillary.planning.pricing import Case, dense_update_seconds
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.plans.update_log import too_far_ahead
from armillary.schedules.registry import options_of

__all__ = ["OwnerCosts", "costs_of", "play_owned", "round_seconds"]

PLAYED = 40  # updates of each worker; the later half is timed
HEADER_BYTES = 56
HANDLED = 5  # messages of a step at each owner: two a letter, and the answer to a pull
BUSY_SHARE = 0.5  # of a message's latency that takes the processor
KEY_BYTES = 8
PUSHES, BEGINS = range(2)  # at the same moment pushes come first


@dataclass(frozen=True)
class OwnerCosts:
    """Of one step of one worker.

    Args:
        sent_bytes: by group, as a worker and as an owner. pull, push: seconds of the links.
        served: seconds that each owner's processor takes for it. computed: forward and backward of the fastest rank.
    """

    sent_bytes: dict[str, float]
    pull: float
    push: float
    served: float
    computed: float


def costs_of(groups: Sequence[Group], case: Case) -> OwnerCosts:
    topology, count = case.topology, case.topology.workers
    away = (count - 1) / count
    sent, pulled, pushed, served = dict[str, float](), 0.0, 0.0, 0.0
    for group in groups:
        facts = [case.profile.parameter(name) for name in group.parameters]
        if group.layout == "row_sharded":
            assert facts[0].rows is not None
            rows, row_bytes = facts[0].rows.alpha_worker * facts[0].rows.rows, facts[0].rows.row_bytes
            there, back = (KEY_BYTES + row_bytes) * rows, (KEY_BYTES + row_bytes) * rows
            served += case.call_seconds + rows * case.row_seconds(row_bytes)
        else:
            nbytes = sum(fact.bytes for fact in facts)
            there = back = nbytes
            served += dense_update_seconds(nbytes, facts, case) / count
        sent[group.name] = (there + back) * away
        pulled, pushed = pulled + there * away, pushed + back * away
    links, others = topology.link, count - 1
    slowest = max(topology.rates, default=1.0)
    computed = sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages) / slowest
    served += HANDLED * BUSY_SHARE * links.latency_seconds if others else 0.0
    header = HEADER_BYTES * others
    trip = 2 * links.latency_seconds if others else 0.0
    return OwnerCosts(
        sent,
        links.seconds(pulled + header, 0) + trip if others else 0.0,
        links.seconds(pushed + header, 0) + links.latency_seconds if others else 0.0,
        served,
        computed,
    )


def round_seconds(costs: OwnerCosts, rates: Sequence[float], bound: int | None) -> float:
    """Seconds in which as many updates are made as there are workers."""
    events = [(0.0, BEGINS, worker) for worker in range(len(rates))]
    updates, free, ends, late = [0] * len(rates), 0.0, list[float](), list[int]()
    while len(ends) < PLAYED * len(rates):
        now, kind, worker = heapq.heappop(events)
        if kind == BEGINS:
            if too_far_ahead(updates[worker], dict(enumerate(updates)), bound):
                late.append(worker)
            else:
                heapq.heappush(events, (now + costs.pull + costs.computed * rates[worker] + costs.push, PUSHES, worker))
            continue
        free = max(now, free) + costs.served
        updates[worker] += 1
        ends.append(free)
        for one in (worker, *late):
            heapq.heappush(events, (free, BEGINS, one))
        late.clear()
    half = len(ends) // 2
    return len(rates) * (ends[-1] - ends[half]) / (len(ends) - 1 - half)


def play_owned(plan: Plan, case: Case) -> Simulation:
    """One step of rank 0, in the time in which as many updates are made as there are workers."""
    costs = costs_of(plan.groups, case)
    rates = case.topology.rates or (1.0,) * case.topology.workers
    seconds = round_seconds(costs, rates, options_of(plan).bound)
    spans, flights, now = list[BusySpan](), list[Transfer](), 0.0
    total = sum(costs.sent_bytes.values()) or 1.0

    def crosses(action: str, taken: float) -> None:
        nonlocal now
        for name, nbytes in costs.sent_bytes.items():
            share = taken * nbytes / total
            spans.append(BusySpan("exposed", name, "wait", now, share))
            flights.append(Transfer(name, action, now, now + share, nbytes / 2))
            now += share

    crosses("pull", costs.pull)
    for stage in case.profile.stages:
        for action, taken in (("forward", stage.forward_seconds), ("backward", stage.backward_seconds)):
            taken *= rates[0] / max(rates)
            spans.append(BusySpan("processor", stage.name or "model", action, now, taken))
            now += taken
    crosses("push", costs.push)
    spans.append(BusySpan("processor", "owner", "update", now, costs.served))
    spans.append(BusySpan("exposed", "others", "wait", now + costs.served, max(0.0, seconds - now - costs.served)))
    return Simulation(case.topology.workers, tuple(spans), tuple(flights), seconds)
