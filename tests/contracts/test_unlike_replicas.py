"""Replicas that differ, whatever exchange lets them: lost weights and ranks, buffers, how far apart replicas are, what
cannot be had with them."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

import armillary
from armillary.planning.planner import plan
from armillary.plans import SIMULTANEOUS, AllReduce, Choice
from armillary.schedules import SCHEDULES
from armillary.session.attach import attach
from contracts.journey import adam, net, one_step, planned, profile_of
from forked import Job
from planning_cases import machines

WORKERS, MIDST, STEPS = 2, 3, 6
GOSSIP = Choice("gossip", {"start": 3, "cap": 4})
EXCHANGES = [Choice("local_steps", {"steps": 2}), GOSSIP]
WISH = {"*": "local_steps(steps=2)"}


class Normed(nn.Module):
    """Statistics that float, a counter, and a buffer of no state_dict."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("largest", torch.zeros(()), persistent=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, batch):
        if self.training:
            self.largest = torch.maximum(self.largest, batch.max())
            self.seen |= batch[0, :2] > 0
        return self.last(torch.relu(self.norm(self.first(batch))))


def made():
    torch.manual_seed(2)
    return Normed().double()


def batch_of(rank, step):
    """Of another mean on each rank."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64) + rank


def loss(model, batch):
    return (model(batch) - 1).square().mean()


def begun(rank, model, **asked):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    examples = [batch_of(worker, 0) for worker in range(WORKERS)]
    return armillary.parallelize(model, optimizer, examples, loss, constraints=WISH, **asked), optimizer


def train(run, model, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss(model, batch_of(run.rank, step)).backward()
        optimizer.step()
        if run.rank == 1 and step == 1:
            model(batch_of(1, step))  # one batch more was seen here


def held(model):
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in found.items()}


def journey(rank, world, folder):
    """What this rank held in the midst of a round, exported, evaluated on, had at the end, closed, and resumed."""
    model = made()
    run, optimizer = begun(rank, model)
    train(run, model, optimizer, 0, MIDST)
    midst, path = held(model), run.save(folder)
    exported = run.export()
    seen = []
    run.evaluate([0], lambda net, batch: seen.append(held(net)) or {"batches": 1.0})
    kept, told = held(model), str(run.report())
    train(run, model, optimizer, MIDST, STEPS - 1)
    end = held(model)
    run.close()
    closed = held(model)
    again = made()
    run, optimizer = begun(rank, again)
    run.load(path)
    train(run, again, optimizer, MIDST, STEPS - 1)
    resumed = held(again)
    run.close()
    return midst, exported, seen[0], kept, told, end, closed, resumed


def same(one, other, but=()):
    return [name for name in one.keys() - {*but} if not torch.equal(one[name], other[name])]


def mean_of(everyones):
    """By name, written out."""
    first, second = everyones
    means = {}
    for name, one in first.items():
        other = second[name]
        if one.dtype.is_floating_point:
            means[name] = (one + other) / 2
        else:
            means[name] = one | other if one.dtype == torch.bool else torch.maximum(one, other)
    return means


def test_everybody_sees_one_model_buffers_included_and_each_rank_goes_on_with_its_own(crew, tmp_path):
    answers = crew(WORKERS).run(journey, str(tmp_path))
    midst, ends = [one[0] for one in answers], [one[5] for one in answers]
    mean, last = mean_of(midst), mean_of(ends)
    assert same(midst[0], midst[1]), "replicas do not differ here"
    assert int(mean["norm.num_batches_tracked"]) > int(midst[0]["norm.num_batches_tracked"])
    exported = answers[0][1]["model"]
    assert [name for name, value in exported.items() if not torch.equal(value, mean[name])] == []
    for rank, (own, _, seen, kept, told, end, closed, resumed) in enumerate(answers):
        assert same(seen, mean) == [] and same(kept, own) == [] and same(closed, last) == []
        assert same(resumed, end, but=["largest"]) == [], rank  # not of the state_dict, so nobody saves it
        assert "replicas' distance" in told


def resized(rank, world, folder, first):
    """Opens what other ranks saved, if they did: what it then holds; trains past a meeting, saves what it held then."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    examples = [batch_of(worker, 0) for worker in range(world)]
    run = armillary.parallelize(model, optimizer, examples, loss, constraints=WISH)
    if first:
        run.load(armillary.latest_checkpoint(folder))
    begins = held(model)
    for step in range(first, first + MIDST):
        optimizer.zero_grad()
        loss(model, batch_of(rank, step)).backward()
        optimizer.step()
    run.save(folder)
    mine = held(model)
    run.close()
    return begins, mine


def test_4_workers_become_2_and_2_become_3_and_each_begins_with_the_mean_of_all_statistics(crew, tmp_path):
    before = None
    for world, first in ((4, 0), (2, MIDST), (3, 2 * MIDST)):
        answers = crew(world).run(resized, str(tmp_path), first)
        for begins, _ in answers if before else ():
            for name in ("norm.running_mean", "norm.running_var", "last.weight"):
                mean = torch.stack([one[name] for one in before]).mean(0)
                torch.testing.assert_close(begins[name], mean, rtol=1e-14, atol=1e-14)
            largest = max(int(one["norm.num_batches_tracked"]) for one in before)
            assert int(begins["norm.num_batches_tracked"]) == largest
            assert torch.equal(begins["seen"], torch.stack([one["seen"] for one in before]).any(0))
        before = [mine for _, mine in answers]
        assert same(before[0], before[1]), "replicas do not differ here"
        assert all(bool(value.isfinite().all()) for one in before for value in one.values())


def distance(rank, world):
    model = made()
    run, optimizer = begun(rank, model)
    train(run, model, optimizer, 0, MIDST)
    apart, weights = run.report().health[0].distance, held(model)
    train(run, model, optimizer, MIDST, MIDST + 1)
    met = run.report().health[0].distance
    run.close()
    return apart, met, {name: value for name, value in weights.items() if name in dict(model.named_parameters())}


def test_the_report_has_how_far_replicas_are_from_their_mean(crew):
    answers = crew(WORKERS).run(distance)
    flat = torch.stack([torch.cat([one.flatten() for one in weights.values()]) for _, _, weights in answers])
    want = float((flat - flat.mean(0)).norm() / WORKERS**0.5 / flat.mean(0).norm())
    for apart, met, _ in answers:
        assert apart == pytest.approx(want, rel=1e-9) and apart > 1e-3 and met == 0


def spoiled(rank, world, wish):
    """Rank 1's weights are lost at step 3, between two meetings."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    examples = [batch_of(worker, 0) for worker in range(WORKERS)]
    try:
        with armillary.parallelize(model, optimizer, examples, loss, constraints=wish, timeout=20) as run:
            train(run, model, optimizer, 0, 2)
            if rank == 1:
                model.last.weight.data[0, 0] = float("nan")
            train(run, model, optimizer, 2, STEPS)
    except (FloatingPointError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("options", ["steps=2", "steps=2, outer_rate=0.7, outer_momentum=0.9"])
def test_a_rank_whose_weights_are_not_finite_says_so_and_sends_none(crew, options):
    (other, heard), (kind, said) = crew(WORKERS).run(spoiled, {"*": f"local_steps({options})"})
    assert kind == "FloatingPointError" and "rank 1: in step 4 its weights are not finite" in said, said
    assert "none were sent" in said and "checkpoint" in said
    assert other == "RuntimeError" and "rank 1" in heard and "not finite" in heard, heard


def test_a_schedule_that_nobody_would_carry_out_is_refused():
    before = dict(SCHEDULES.all())
    SCHEDULES.register("mine", replace(SCHEDULES[SIMULTANEOUS.name], examples=()))
    try:
        with pytest.raises(ValueError, match="schedule mine leaves the loop to the user"):
            plan(profile_of(2), machines(2, megabits=0.1), schedule="mine")
    finally:
        SCHEDULES._entries = before


def killed_in_a_meeting(rank, workers, choice):
    model = net()
    run = attach(planned(workers, choice), model, adam(model), report_after=1.0, timeout=5.0)
    for step in range(4):
        one_step(run, step)
    if rank == 1:
        for unit in run._engine.executor.units:
            unit.exchange = unit.exchange._replace(push=dying(unit.exchange.push))
    for step in range(4, 8):
        one_step(run, step)


def dying(push):
    """Dies with its first request: of one that makes several, when the answer has come."""

    def program(parcel, state, place):
        begun = push(parcel, state, place)
        request = begun.send(None)
        if place.workers > 2 and not isinstance(request, AllReduce):
            yield request
        os.kill(os.getpid(), signal.SIGKILL)

    return program


def test_a_rank_that_is_killed_in_a_meeting_is_named():
    for job in [Job(3, killed_in_a_meeting, choice) for choice in EXCHANGES]:  # all wait at the same time
        for rank, one in enumerate(job.ended()):
            if rank != 1:
                assert one.code == 1 and "rank 1: no sign of life" in one.err, one.err


# What cannot be had with them


@pytest.mark.parametrize("choice", EXCHANGES, ids=str)
def test_declared_weights_are_refused(choice):
    said = rf"mean='weights' weighs gradients, but {choice.name}.* lets weights"
    with pytest.raises(ValueError, match=said):
        planned(2, choice, mean="weights")


def refused(rank, workers, choice):
    """What is said of what would ask all ranks in every step."""
    told = []
    for asked in ({"scaler": torch.amp.GradScaler("cpu")}, {"check_finite": True}):
        model = net()
        with pytest.raises(ValueError, match="asks all ranks") as raised:
            attach(planned(workers, choice), model, adam(model), **asked)
        told.append(str(raised.value))
    model = net()
    run = attach(planned(workers, choice), model, adam(model))
    for loader in (list(range(3 + rank)), iter(range(3))):
        with pytest.raises(ValueError, match=r"run\.batches") as raised:
            next(run.batches(loader))
        told.append(str(raised.value))
    even = list(run.batches(list(range(3))))
    run.close()
    return told, even


@pytest.mark.parametrize("choice", EXCHANGES, ids=str)
def test_what_asks_all_ranks_in_every_step_is_refused_by_name(crew, choice):
    for (scaler, finite, uneven, unknown), even in crew(2).run(refused, choice):
        assert "a GradScaler asks all ranks" in scaler and "use bfloat16" in scaler
        assert "check_finite=True asks all ranks" in finite and "drop it" in finite
        assert "rank 0: 3, rank 1: 4" in uneven and "give every rank as many" in uneven
        assert "rank 0: unknown" in unknown
        assert even == [0, 1, 2]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "ring"])
@pytest.mark.parametrize("choice", EXCHANGES, ids=str)
def test_a_schedule_that_owns_the_loop_is_refused(choice, schedule):
    with pytest.raises(ValueError, match=choice.name):
        planned(2, choice, schedule=schedule)


@pytest.mark.parametrize("name", ["local_steps", "gossip"])
def test_check_finds_that_it_keeps_its_rules(name):
    assert f"exchange {name}" in armillary.check(name) and "keeps its" in armillary.check(name)
