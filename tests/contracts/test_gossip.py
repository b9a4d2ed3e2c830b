"""Gossip on a ring, beside plain loops over replicas that know neither exchange nor runtime; saved, moved, broken."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import armillary
from armillary.exchanges import build_dense
from armillary.exchanges import gossip as shelf_file
from armillary.plans import Choice
from armillary.session.attach import attach
from contracts.journey import (
    adam,
    batch_of,
    loss,
    net,
    one_step,
    planned,
    saved_and_resumed,
    unlike,
    verified,
    with_push,
)

STEPS, FEW_STEPS = 30, 16
OPTIONS = {"horizon": 1.0, "cap": 4, "start": 3}
KEEP, REPLACE = (Choice("gossip", {**OPTIONS, "mixing": mixing}) for mixing in ("keep", "replace"))


def begun(workers, choice, **asked):
    model = net()
    return attach(planned(workers, choice), model, adam(model), **asked)


class Plain:
    """EventGraD in one process. Of each rank and tensor: its weights, what each neighbour has of them, and the numbers
    of the trigger."""

    def __init__(self, workers, horizon, mixing, cap, start):
        self.workers, self.horizon, self.mixing, self.cap, self.start = workers, horizon, mixing, cap, start
        self.models = [copy.deepcopy(net()) for _ in range(workers)]
        self.optimizers = [adam(model) for model in self.models]
        self.weights = [dict(model.named_parameters()) for model in self.models]
        self.public = [{name: p.detach().clone() for name, p in one.items()} for one in self.weights]
        self.memory = [{name: [0.0, 0.0, 0.0, 0] for name in one} for one in self.weights]
        self.passes = self.sent = 0

    def fires(self, rank, name):
        norm, (old, limit, slope, last) = float(self.weights[rank][name].norm()), self.memory[rank][name]
        limit, change = limit * self.horizon, abs(norm - old)
        if change < limit and self.passes > self.start and self.passes - last < self.cap:
            self.memory[rank][name][1] = limit
            return False
        new = change / (self.passes - last)
        self.memory[rank][name] = [norm, (new + slope) / 2, new, self.passes]
        return True

    def step(self):
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss(model, batch_of(rank, self.passes)).backward()
        self.passes += 1
        with torch.no_grad():
            for name in self.weights[0]:
                for rank in range(self.workers):
                    if self.fires(rank, name):
                        self.public[rank][name] = self.weights[rank][name].clone()
                        self.sent += 1
                self.mix(name)
        for optimizer in self.optimizers:
            optimizer.step()

    def mix(self, name):
        """In place; copies do not move meanwhile."""
        for rank in range(self.workers):
            mine, near = self.weights[rank][name], {(rank - 1) % self.workers, (rank + 1) % self.workers} - {rank}
            if self.mixing == "keep":
                for other in near:
                    mine += (self.public[other][name] - self.public[rank][name]) / (len(near) + 1)
            else:
                mine.copy_((mine + sum(self.public[other][name] for other in near)) / (len(near) + 1))


def apart(weights, run):
    return max(float((p - weights[run.rank][name]).detach().abs().max()) for name, p in run._model.named_parameters())


def beside_plain(rank, workers, choice, fault=None, steps=STEPS):
    """The largest gap after any step; tensors sent in the plain loops, and how many could have been."""
    run = begun(workers, choice, check_order=True)
    plain = Plain(workers, **{"mixing": "keep", "cap": 20, "start": 30, **choice.options})
    if fault:
        fault(run)
    worst = 0.0
    for step in range(steps):
        one_step(run, step)
        plain.step()
        worst = max(worst, apart(plain.weights, run))
    exported, mean = run.export(), {n: sum(one[n] for one in plain.weights) / workers for n in plain.weights[0]}
    if rank == 0:
        worst = max(worst, *(float((exported["model"][n] - p).detach().abs().max()) for n, p in mean.items()))
    run.close()
    return worst, plain.sent, workers * steps * len(plain.weights[0])


@pytest.mark.parametrize(("workers", "choice"), [(2, KEEP), (3, REPLACE), (4, KEEP), (4, REPLACE)])
def test_it_is_the_plain_loops(crew, workers, choice):
    for gap, sent, most in crew(workers).run(beside_plain, choice):
        assert gap < 1e-13
        assert 0.2 * most < sent < 0.9 * most  # some were kept back, and some not


class MixedInFull(Plain):
    """D-PSGD: there is no trigger; mean of own and neighbouring weights."""

    def mix(self, name):
        old = [one[name].detach().clone() for one in self.weights]
        for rank, one in enumerate(self.weights):
            near = {(rank - 1) % self.workers, (rank + 1) % self.workers} - {rank}
            one[name].copy_((old[rank] + sum(old[other] for other in near)) / (len(near) + 1))


def beside_d_psgd(rank, workers, mixing):
    run, plain = (
        begun(workers, Choice("gossip", {"horizon": 0.0, "mixing": mixing, "start": 0})),
        MixedInFull(workers, 0.0, mixing, 1, 0),
    )
    for step in range(20):
        one_step(run, step)
        plain.step()
    gap = apart(plain.weights, run)
    run.close()
    return gap


@pytest.mark.parametrize("mixing", ["keep", "replace"])
def test_horizon_0_is_d_psgd(crew, mixing):
    assert max(crew(3).run(beside_d_psgd, mixing)) < 1e-13


# Faults, each of which the plain loops must tell.


def with_state(change):
    """A fault in what every group remembers: change(before, after) -> after, otherwise."""
    return with_push(lambda result, after, place, before: (result, change(before, after)))


def copy_of_another_rank(run):
    with_state(lambda before, after: {**after, "left": after["right"]})(run)


def copy_of_its_own(run):
    with_state(lambda before, after: {**after, "right": after["sent"]})(run)


def cap_off_by_one(run):
    for unit in run._engine.executor.units:
        unit.exchange = build_dense("gossip", **{**KEEP.options, "cap": KEEP.options["cap"] + 1})


def sent_but_not_remembered(run):
    with_state(lambda before, after: {**after, **{name: before[name] for name in ("norm", "limit", "slope", "last")}})(
        run
    )


def own_copy_not_remembered(run):
    with_state(lambda before, after: {**after, "sent": before["sent"]})(run)


def gradient_of_the_mixed_weights(run):
    for unit in run._engine.executor.units:
        unit.exchange = unit.exchange._replace(meeting="after")


FAULTS = [
    copy_of_another_rank, copy_of_its_own, cap_off_by_one, sent_but_not_remembered, own_copy_not_remembered,
    gradient_of_the_mixed_weights,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(crew, fault):
    assert max(gap for gap, _, _ in crew(3).run(beside_plain, KEEP, fault, FEW_STEPS)) > 1e-6


# Saved, moved, verified.


@pytest.mark.parametrize("choice", [KEEP, REPLACE], ids=str)
def test_what_was_saved_between_two_messages_is_resumed_to_the_bit(crew, tmp_path, choice):
    early = Choice("gossip", {**choice.options, "start": 1})
    assert crew(3).run(saved_and_resumed, nullcontext, early, str(tmp_path)) == [[]] * 3


def gone_on(rank, workers, folder, taken):
    """From the newest checkpoint of another number of ranks. Whether all begin alike, and how old each copy may be."""
    run = begun(workers, KEEP)
    if taken:
        run.load(armillary.latest_checkpoint(folder))
    begins = {name: p.detach().clone() for name, p in run._model.named_parameters()}
    ages = [float(unit.state["pass"].max()) for unit in run._engine.executor.units]
    for step in range(taken, taken + 6):
        one_step(run, step)
    run.save(folder)
    finite = all(bool(p.isfinite().all()) for p in run._model.parameters())
    run.close()
    return begins, ages, finite


def test_4_ranks_become_2_and_2_become_3(crew, tmp_path):
    for workers, taken in ((4, 0), (2, 6), (3, 12)):
        (first, ages, finite), *others = crew(workers).run(gone_on, str(tmp_path), taken)
        assert finite and not any(ages)  # so each tensor's first message replaces what neighbours hold
        assert all(unlike(first, theirs) == [] for theirs, _, _ in others)


@pytest.mark.parametrize("choice", [Choice("gossip"), Choice("gossip", {"mixing": "replace"})], ids=str)
def test_verify_sees_each_mechanism(crew, choice):
    for is_equal, said in crew(3).run(verified, nullcontext, choice):
        assert is_equal and "NOT exact, held to its own oracle" in said and "NOT exercised" not in said, said
        assert "tensors kept back" in said and "tensors sent 3 passes after the last time" in " ".join(said.split())


# Who is waited for.


def refuse_collectives():
    """From here on a request of all ranks is an error."""

    def refused(*_, **__):
        raise AssertionError("asked all ranks")

    names = ("all_reduce", "barrier", "broadcast", "all_gather_object", "all_gather_into_tensor", "all_to_all_single")
    before = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, refused)
    return before


def with_neighbours_only(rank, workers):
    run = begun(workers, KEEP)
    for step in range(4):
        one_step(run, step)
    run._transport.take_records()
    before, run._transport.recording = refuse_collectives(), True
    try:
        for step in range(4, 7):  # data and parameters are compared in steps 1, 2, 3, 4, 8, 10
            one_step(run, step)
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    groups, records = {unit.name for unit in run._engine.units}, run._transport.take_records()
    kinds = {(record.action, record.group in groups) for record in records}
    density = [unit.exchange.density(unit.bucket.layout, unit.state) for unit in run._engine.units]
    run.close()
    return kinds, density


def test_a_step_asks_nothing_of_all_ranks(crew):
    for kinds, density in crew(4).run(with_neighbours_only):
        assert kinds == {("AllToAll", True)} and all(0 <= share <= 1 for share in density)


def test_the_sides_of_a_ring_are_each_others():
    for workers in (2, 3, 4, 8):
        for rank in range(workers):
            for side in shelf_file._sides(rank, workers):
                back = [one for one in shelf_file._sides(side.rank, workers) if one.copy == side.back]
                assert [one.rank for one in back] == [rank] and back[0].back == side.copy
