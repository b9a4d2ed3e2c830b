"""A model held to any residencies trains as one that keeps everything, in every bit; and what would not is seen."""

import os
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from armillary import residency
from armillary.residency import optimizer_state, recompute, swap, tier
from armillary.residency.stage_costs import SWAP
from held_models import KINDS, adam, different, held_by, steps

WORDS = ("keep", "recompute", "swap")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def kept(disk):
    """By kind of model: its plan, and what it leaves where all is kept."""
    made = {}
    for name, kind in KINDS.items():
        model = kind.model()
        plan = residency.hold(model, [kind.batch(0)], kind.loss, tier=disk).plan
        made[name] = plan, steps(kind, model, adam(model))
    return made


def run(kept, name, residencies, slots, disk, away=False):
    """Names of what differs from keeping everything."""
    kind, (plan, expected) = KINDS[name], kept[name]
    model = kind.model()
    optimizer = adam(model)
    held = held_by(plan, residencies, slots, model, disk, optimizer=optimizer if away else None)
    return different(steps(kind, model, optimizer, held), expected)


@pytest.mark.parametrize("name", KINDS)
def test_every_residency_on_every_stage_and_mixtures_of_them(kept, disk, name):
    alone = [["keep"] * i + [word] + ["keep"] * (5 - i) for i in range(6) for word in ("recompute", "swap")]
    draw = random.Random(name)
    mixed = [[draw.choice(WORDS) for _ in range(6)] for _ in range(20 if "," not in name else 7)]
    for number, residencies in enumerate(alone + mixed if "," not in name else mixed):
        assert not run(kept, name, residencies, 1 + number % 3, disk), residencies


@pytest.mark.parametrize("name", ["transformer", "convolution"])
def test_the_optimizers_state_in_the_tier(kept, disk, name):
    assert not run(kept, name, ["swap", "recompute", "keep"] * 2, 2, disk, away=True)


MIXED = ["swap", "swap", "swap", "recompute", "recompute", "keep"]


def buffers_moved_twice(monkeypatch):
    monkeypatch.setattr(recompute, "_buffers_put_back", lambda stage: nullcontext())


def random_state_not_restored(monkeypatch):
    plain = recompute.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", lambda *a, **k: plain(*a, **k, preserve_rng_state=False))


def bytes_of_another_pass(monkeypatch):
    """What is read back lies where the pass before had put its own."""
    places, plain = {}, tier.FileTier.read

    def read(self, flat, place):
        plain(self, flat, places.setdefault(len(flat), place))

    monkeypatch.setattr(tier.FileTier, "read", read)


def a_view_as_its_base(monkeypatch):
    plain = swap._View
    monkeypatch.setattr(swap, "_View", lambda stored, dtype, offset, *more: plain(stored, dtype, 0, *more))


def a_slot_given_early(monkeypatch):
    """A storage is let go before it was written, and its memory used again."""

    def write(self, moment):
        self._flat.zero_()
        plain(self, moment)

    plain = swap.Stored._write
    monkeypatch.setattr(swap.Stored, "_write", write)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (buffers_moved_twice, "convolution"),
        (random_state_not_restored, "transformer"),
        (bytes_of_another_pass, "transformer"),
        (a_view_as_its_base, "transformer"),
        (a_slot_given_early, "transformer"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_planted_fault_shows(kept, disk, monkeypatch, plant, name):
    assert not run(kept, name, MIXED, 2, disk)
    plant(monkeypatch)
    assert run(kept, name, MIXED, 2, disk)


def test_an_update_before_its_gradients_are_there_shows(kept, disk, monkeypatch):
    """A part of the step is made with the gradients of the step before."""
    plain, before = optimizer_state.AwayState.step, {}

    def step(self, closure):
        parameters = optimizer_state._parameters(self._optimizer)
        now = {one: one.grad.clone() for one in parameters}
        for one in parameters[:2]:
            one.grad.copy_(before.get(one, now[one]))
        before.update(now)
        return plain(self, closure)

    monkeypatch.setattr(optimizer_state.AwayState, "step", step)
    assert run(kept, "transformer", MIXED, 2, disk, away=True)


def test_a_short_write_is_an_error(kept, disk, monkeypatch):
    plain = os.pwritev
    monkeypatch.setattr(tier.os, "pwritev", lambda file, parts, at: plain(file, [parts[0][:4096]], at))
    with pytest.raises(OSError, match="took 4096 of"):
        run(kept, "transformer", MIXED, 2, disk)


def test_forward_waits_for_a_slot(disk, monkeypatch):
    """With one slot, no more than two stages' storages are there while a slow tier writes."""
    kind = KINDS["convolution"]
    model = kind.model()
    waiting, most = set(), [0]
    plain_leave, plain_write = swap.Stored.leave, swap.Stored._write

    def leave(self, *args):
        waiting.add(self)
        most[0] = max(most[0], len({one.stage for one in waiting}))
        plain_leave(self, *args)

    def write(self, *args):
        plain_write(self, *args)
        waiting.discard(self)

    monkeypatch.setattr(swap.Stored, "leave", leave)
    monkeypatch.setattr(swap.Stored, "_write", write)
    plan = residency.hold(model, [kind.batch(0)], kind.loss, tier=disk).plan
    for slots in (1, 2, 3):
        most[0] = 0
        with held_by(plan, [SWAP] * 6, slots, model, disk, tier_bytes_per_second=30e6):
            kind.loss(model, kind.batch(0)).backward()
        assert most[0] == slots + 1, slots


@pytest.mark.parametrize("name", ["transformer", "convolution"])
def test_the_hosts_memory_as_a_tier(kept, name):
    kind, (plan, expected) = KINDS[name], kept[name]
    model = kind.model()
    optimizer = adam(model)
    held = residency.Held(model, replace(plan, residencies=tuple(MIXED)), tier.PinnedTier, optimizer)
    assert not different(steps(kind, model, optimizer, held), expected)
    assert held.measured.moved_bytes > 0


def test_hooks_are_gone_afterwards(disk):
    kind = KINDS["transformer"]
    model = kind.model()
    optimizer = adam(model)
    before = [(vars(module).copy(), len(module._forward_hooks)) for module in model.modules()]
    held = residency.hold(model, [kind.batch(0)], kind.loss, tier=disk, optimizer=optimizer, constraints={"*": "swap"})
    steps(kind, model, optimizer, held)
    after = [(vars(module).copy(), len(module._forward_hooks)) for module in model.modules()]
    assert [one[0].keys() for one in before] == [one[0].keys() for one in after]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert type(optimizer) is torch.optim.Adam and type(optimizer.state).__name__ == "defaultdict"
    assert not os.listdir(disk)
