"""Plans timed in the job: the quicker one is carried out on every rank, and nothing of the trial is left."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from armillary.cli.names import find, small
from armillary.planning.request import PlanRequest
from armillary.plans import Choice
from armillary.profiler.profiler import profile
from armillary.session import autotune
from armillary.session import plan_job as decide_file
from armillary.session.autotune import AHEAD
from armillary.session.double_precision import uniform_plan
from armillary.session.plan_job import JobRequest, first_batches, model_to_plan, open_transport, plan_job
from armillary.transport.groups import Timeouts
from armillary.transport.transport import Transport
from planning_cases import machines

SLOWED_SECONDS = 0.05  # more than a step takes where other work shares the machine
FEW_STEPS = 2  # that a turn times: what is slowed is slow in every step
TOGETHER = " + "  # in the label of requests that travel as one


@contextmanager
def slower(slowed):
    """Requests of that label, or those that travel as one, wait before they are made. So slow a job is tried for the
    fewest rounds."""
    start, kept = Transport.start, (autotune.LONGEST_SECONDS, autotune.TIMED_STEPS)

    def late(self, request, label, *parts):
        if label == slowed or (slowed == TOGETHER and TOGETHER in label):
            autotune.time.sleep(SLOWED_SECONDS)
        return start(self, request, label, *parts)

    Transport.start = late
    autotune.LONGEST_SECONDS, autotune.TIMED_STEPS = 0.0, FEW_STEPS
    try:
        yield
    finally:
        Transport.start = start
        autotune.LONGEST_SECONDS, autotune.TIMED_STEPS = kept


@contextmanager
def counted(kind, noted=lambda one: one):
    """What is made of a kind, or what is noted of it as soon as it is made."""
    made, begin = [], kind.__init__

    def counting(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        made.append(noted(self))

    kind.__init__ = counting
    try:
        yield made
    finally:
        kind.__init__ = begin


def tried(rank, workers, slowed):
    """Two plans; in one the table of that name is a group of its own, and waits before every request."""
    task = find("language_model", small("language_model"))
    subject, transport = model_to_plan(task, 0), open_transport()
    seen = profile(subject.model, subject.draw(workers), subject.loss, workers=workers)
    plans = {name: uniform_plan(seen, Choice(name)) for name in ("gather_rows", "all_reduce")}
    batches = first_batches(task, workers, 2, 0)[rank::workers]
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    stream = torch.get_rng_state()
    with slower(slowed), counted(Transport) as opened:
        found = autotune.fastest(plans, subject.model, subject.optimizer, subject.loss, batches, transport)
    transport.close()
    assert len(opened) == 1, "plans alike in their nodes and turns share their connections"
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    return found


def test_the_plan_that_took_longer_is_not_carried_out(crew):
    first, second = crew(2).run(tried, "output")
    assert first == second
    assert all(group.exchange.name == "all_reduce" for group in first.groups)
    assert "timed in this job over 8 steps each: " in first.notes[-1]
    assert "all_reduce " in first.notes[-1] and "gather_rows " in first.notes[-1]
    assert first.notes[-1].endswith("all_reduce is carried out")


def tried_in_a_group(rank, workers):
    """On connections of which the timed ones are to be the likes."""
    subject = model_to_plan(find("language_model", small("language_model")), 0)
    seen = profile(subject.model, subject.draw(workers), subject.loss, workers=workers)
    plans = {"plain": uniform_plan(seen, Choice("all_reduce"))}
    group, timeouts = dist.new_group(range(workers)), Timeouts(report_after=30.0, timeout=50.0)
    transport = open_transport(group, timeouts)

    def likeness(one):
        return one.open_groups.parent is group, one.watchdog.timeouts == timeouts

    with slower(""), counted(Transport, likeness) as found:  # one that is closed knows its group no more
        autotune.fastest(plans, subject.model, subject.optimizer, subject.loss, list(subject.draw(workers)), transport)
    transport.close()
    return found


def test_plans_are_timed_among_the_ranks_that_train_by_waits_as_long_as_theirs(crew):
    assert crew(2).run(tried_in_a_group) == [[(True, True)]] * 2


@pytest.mark.parametrize(
    ("rival", "wins"),
    [([9.0, 9.0, 9.0, 9.0], True), ([9.0, 9.0, 9.0, 30.0], True), ([9.0, 9.0, 11.0, 11.0], False), ([9.8] * 4, False)],
)
def test_the_best_by_forecast_is_replaced_by_what_is_faster_by_more_than_noise(rival, wins):
    assert autotune._winner({"first": [10.0, 10.0, 10.0, 10.0], "rival": rival}) == ("rival" if wins else "first")


def test_of_several_rivals_the_fastest_is_taken_however_close_they_are_to_one_another():
    turns = {"first": [10.0] * 4, "second": [9.3] * 4, "third": [9.1] * 4, "fourth": [9.0] * 4, "fifth": [9.2] * 4}
    assert autotune._winner(turns) == "fourth"


class Alone:
    """The transport of one rank, as autotune use it."""

    def barrier(self):
        pass

    def agree_largest(self, values):
        return values


class Clock:
    """Goes on when a step is taken, and not else."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def steps(self, seconds, taken):
        while True:
            taken.append(seconds)
            self.now += seconds
            yield


def test_what_is_far_behind_after_two_rounds_is_timed_no_more(monkeypatch):
    """The first by forecast too: it wins nothing by its place."""
    clock = Clock()
    monkeypatch.setattr(autotune, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(autotune, "time", clock)
    taken = {"first": [], "near": [], "quick": []}
    seconds = {"first": 0.016, "near": 0.014, "quick": 0.01}
    found = autotune._turns({name: clock.steps(seconds[name], taken[name]) for name in taken}, Alone())
    a_turn = 1 + autotune.TIMED_STEPS
    assert [len(took) for took in taken.values()] == [a_turn * rounds for rounds in (2, 4, 4)]
    assert [len(rounds) for rounds in found.values()] == [2, 4, 4]
    assert autotune._winner(found) == "quick"
    said = autotune._said(found)
    assert said == (
        "timed in this job over 12 steps each: near 14.0 ms, quick 10.0 ms; over 6, then set aside: first 16.0 ms"
    )


def tried_ahead(rank, workers, slowed):
    """The same plan with prefetch and without."""
    task = find("language_model", small("language_model"))
    subject = model_to_plan(task, 0)
    seen = profile(subject.model, subject.draw(workers), subject.loss, workers=workers)
    plain = uniform_plan(seen, Choice("owned_rows"))
    ahead = [replace(group, prefetch="ids") if group.layout == "row_sharded" else group for group in plain.groups]
    plans = {"plain": plain, "ahead": replace(plain, groups=tuple(ahead))}
    batches = first_batches(task, workers, 2, 0)[rank::workers]
    with slower(slowed):
        return autotune.fastest(plans, subject.model, subject.optimizer, subject.loss, batches, open_transport())


@pytest.mark.parametrize(("slowed", "looks_ahead"), [(TOGETHER, False), ("look-ups", True)])
def test_prefetch_is_carried_out_only_where_it_is_faster(crew, slowed, looks_ahead):
    """Slowed is what only prefetch sends, or the rounds of which it makes fewer."""
    first, second = crew(2).run(tried_ahead, slowed)
    assert first == second and first.looks_ahead == looks_ahead
    assert first.notes[-1].startswith("timed in this job over 8 steps each: ")
    assert "plain " in first.notes[-1] and "ahead " in first.notes[-1]
    assert first.notes[-1].endswith("ahead is carried out" if looks_ahead else "plain is carried out")


def without_batches(rank, workers):
    subject = model_to_plan(find("language_model", small("language_model")), 0)
    seen = profile(subject.model, subject.draw(workers), subject.loss, workers=workers)
    plans = {"plain": uniform_plan(seen, Choice("all_reduce"))}
    few, transport = [subject.draw(workers)[0]][rank:], open_transport()
    with pytest.raises(ValueError, match="have no batch") as caught:
        autotune.fastest(plans, subject.model, subject.optimizer, subject.loss, few, transport)
    return str(caught.value)


def test_a_rank_without_a_batch_is_named_on_every_rank(crew):
    assert (
        crew(2).run(without_batches) == ["ranks [1] have no batch to time plans with; give every rank two or more"] * 2
    )


def decided(rank, workers, times_prefetch):
    subject = model_to_plan(find("language_model", small("language_model")), 0)
    return plan_job(subject, JobRequest(autotune=2, times_prefetch=times_prefetch)).plan


@pytest.mark.parametrize("times_prefetch", [False, True])
def test_every_rank_decides_for_the_same_timed_plan(crew, times_prefetch):
    """Among them is one that prefetches, if the loop lets it."""
    first, second = crew(2).run(decided, times_prefetch)
    assert first == second and "timed in this job" in first.notes[-1]
    assert (AHEAD in first.notes[-1]) == times_prefetch


def offered(rank, workers, prefetch, times_prefetch):
    """How tables look ahead in the plans that are to be timed, over links on which much is gained by it."""
    subject, kinds = model_to_plan(find("language_model", small("language_model")), 0), set()
    wanted = PlanRequest({"output": "owned_rows", "embedding.weight": "owned_rows"}, prefetch=prefetch)

    def taking_the_first(plans, *_):
        kinds.update(group.prefetch for one in plans.values() for group in one.groups)
        return next(iter(plans.values()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide_file, "fastest", taking_the_first)
        plan_job(subject, JobRequest(wanted, topology=machines(1, workers), autotune=9, times_prefetch=times_prefetch))
    return kinds


@pytest.mark.parametrize(
    ("prefetch", "times_prefetch", "may_wait"), [(None, False, False), (True, False, True), (None, True, True)]
)
def test_gradients_wait_in_timed_plans_only_where_somebody_asked_for_prefetch(crew, prefetch, times_prefetch, may_wait):
    for kinds in crew(2).run(offered, prefetch, times_prefetch):
        assert ("gradients" in kinds) is may_wait and kinds & {"ids", "rows", "gradients"}
