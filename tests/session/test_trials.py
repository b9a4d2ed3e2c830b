"""Plans timed in the job: the quicker one is carried out on every rank, and nothing of the trial is left."""

import torch

from armillary.cli.find import find, small
from armillary.facts.plan import Choice
from armillary.runtime.transport import Transport
from armillary.runtime.watch.profiler import profile
from armillary.session import trials
from armillary.session.decide import Wishes, decide, first_batches, open_transport, subject_of
from armillary.session.forced import forced

SLOWED_SECONDS = 0.02


def tried(rank, workers, slowed):
    """Two plans; in one the table of that name is a group of its own, and waits before every request."""
    task = find("language_model", small("language_model"))
    subject, transport = subject_of(task, 0), open_transport()
    seen = profile(subject.model, subject.draw(workers), subject.loss, workers=workers)
    plans = {name: forced(seen, Choice(name)) for name in ("gather_rows", "all_reduce")}
    (batch,) = first_batches(task, workers, 1, 0)[rank : rank + 1]
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    stream, start = torch.get_rng_state(), Transport.start

    def late(self, request, label):
        if label == slowed:
            trials.time.sleep(SLOWED_SECONDS)
        return start(self, request, label)

    Transport.start = late
    try:
        found = trials.fastest(plans, subject.model, subject.optimizer, subject.loss, batch, transport)
    finally:
        Transport.start = start
    transport.close()
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    return found


def test_the_plan_that_took_longer_is_not_carried_out(crew):
    first, second = crew(2).run(tried, "output")
    assert first == second
    assert all(group.exchange.name == "all_reduce" for group in first.groups)
    assert "timed in this job over 12 steps each: gather_rows " in first.notes[-1]
    assert first.notes[-1].endswith("all_reduce is carried out")


def decided(rank, workers):
    found = decide(subject_of(find("language_model", small("language_model")), 0), Wishes(trials=2))
    return found.plan


def test_every_rank_decides_for_the_same_timed_plan(crew):
    first, second = crew(2).run(decided)
    assert first == second and "timed in this job" in first.notes[-1]
