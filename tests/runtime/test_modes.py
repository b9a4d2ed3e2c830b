"""What every mode of the interpreter must keep, over the schedules that it carries out: the reference's weights, losses
and buffers bit for bit, by point-to-point messages alone, the versions read that the schedule names, state at home."""

from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import nn

import modes
from armillary.schedules import NORMS, Clip
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.schedules.routes import refuse_in_ring, refuse_on_one_device
from armillary.schedules.simultaneous import simultaneous
from modes import Case, compare, compare_in_threads
from staged_models import EVERY_CLIP, LOOSE, OPTIMIZERS, TIGHT, Careful, Twice, rings

BATCH_NORM, HALF = {"norm": nn.BatchNorm1d}, {"autocast": "forward and loss", "dtype": torch.float32}
PRECISIONS = torch.float32, torch.float64
SMALL = [schedule for workers in (1, 2, 3) for schedule in rings(workers)]
RINGS, ZERO_RINGS = [*SMALL, *rings(4)[::2]], [*SMALL, *rings(4)[1::2]]
PIPELINES = [
    cyclic_pipeline(k, m, slack) for k in (1, 2, 3, 4) for m in (k - 1, k, 2 * k) for slack in (0, 1, m) if m > 0
]
SHARED = [cyclic(n, slack=slack) for n in (1, 2, 3) for slack in sorted({0, 1, n})]
IN_STEP = [simultaneous(3, 2), simultaneous(4, 4), delayed_all_reduce(3, 2)]
SCHEDULES = {"one_device": RINGS, "ring": RINGS, "zero_ring": ZERO_RINGS, "pipeline": PIPELINES, "shared": SHARED}
OTHERS = {
    "one_device": [*IN_STEP, accumulation(3, 2), gpipe(3, 2), one_f_one_b(3, 4), cyclic_pipeline(3, 4)],
    "ring": IN_STEP,
    "zero_ring": IN_STEP,
    "pipeline": [make(k, m) for make in (gpipe, one_f_one_b) for k, m in ((2, 3), (3, 2), (4, 4))],
}


class FromFirst(nn.Module):
    """Sets its offset by the first value it ever sees; later forwards only read it."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("offset", torch.zeros(width))
        self.register_buffer("is_set", torch.zeros(()))

    def forward(self, value):
        if not self.is_set:
            self.offset.copy_(value.detach().mean(0))
            self.is_set.fill_(1.0)
        return value - self.offset


def with_careful_parts(dtype):
    torch.manual_seed(0)
    return nn.ModuleList([Twice(), Careful(), nn.Sequential(nn.Dropout(0.2), Twice())]).to(dtype)


# Drains and looks at the newest weights, buffers, recomputation, optimizers.
BETWEEN_STEPS = {
    "one_device": [
        *(Case(cyclic(3, slack=1), optimizer=name) for name in OPTIMIZERS),
        *(Case(cyclic(3), recompute=again, model={"norm": norm}) for again in (frozenset(), frozenset({0, 2}))
          for norm in (nn.LayerNorm, nn.BatchNorm1d, partial(nn.GroupNorm, 1))),
        *(Case(cyclic(3), recompute=frozenset(again), model={"dropout": 0.5}) for again in ({1}, {0, 1, 2})),
        Case(cyclic(3, slack=1), settles=(1, 3)), Case(cyclic(3, slack=1), drains=(2, 4)),
        Case(cyclic_pipeline(3, 2), drains=(3,)),
    ],
    "ring": [
        *(Case(cyclic(3, slack=place % 2), optimizer=name) for place, name in enumerate(OPTIMIZERS)),
        Case(cyclic(4), drains=(1, 4)), Case(cyclic(4, slack=4), drains=(2,), settles=(4,)),
        Case(cyclic(3, 5, slack=1), settles=(2, 3), model=BATCH_NORM),
    ],
    "zero_ring": [
        *(Case(cyclic(3, slack=place % 2), optimizer=name) for place, name in enumerate(OPTIMIZERS)),
        Case(cyclic(4), drains=(1, 4)), Case(cyclic(4, slack=4), drains=(2,), settles=(4,)),
        Case(cyclic(4, 8, slack=1), drains=(0, 3), settles=(1, 2, 3)),
        Case(cyclic(3, 5, slack=1), settles=(2, 3), model=BATCH_NORM), Case(cyclic(2, 6), drains=(1, 2, 3, 4)),
    ],
    "pipeline": [
        Case(cyclic_pipeline(3, 3, 1), **option) for option in (
            {"drains": (2, 4)}, {"settles": (1, 3)}, {"recompute": frozenset({0, 2})}, {"model": BATCH_NORM},
            {"model": BATCH_NORM, "recompute": frozenset({0, 1, 2})}, {"optimizer": "adamw"}, {"optimizer": "adagrad"},
        )
    ],
    "shared": [
        *(Case(cyclic(3, slack=place % 2), **option) for place, option in enumerate((
            {"drains": (2, 4)}, {"settles": (1, 3)}, {"drains": (3,), "settles": (1, 2)},
            {"recompute": frozenset({0, 2})}, {"optimizer": "adamw"}, {"optimizer": "adagrad", "drains": (1,)},
        ))),
        *(Case(cyclic(3, slack=1), model=BATCH_NORM, **option) for option in (
            {}, {"drains": (2, 4)}, {"settles": (1, 3)}, {"recompute": frozenset({0, 1})}, {"dtype": torch.float32},
        )),
        Case(cyclic(2), model=BATCH_NORM, settles=(2,)),
        *(Case(cyclic(3, slack=slack), model={"norm": FromFirst}, drains=(2,)) for slack in (0, 1)),
    ],
}  # fmt: skip

LATE = {"drains": (2, 4), "settles": (1, 3)}
LOOKED_AT = [{"drains": (2, 4)}, {"settles": (1, 3)}, {"optimizer": "adamw", "drains": (3,), "settles": (4,)}]


def has_time(mode, schedule):
    """Whether it can clip by the norm over all stages."""
    try:
        (refuse_on_one_device if mode == "one_device" else refuse_in_ring)(schedule, Clip(1.0))
    except ValueError:
        return False
    return True


def clipped(mode, schedules, *clips):
    """Each schedule with each clip for whose norm it has time; float64 and float32 by turns."""
    dtypes = cycle(PRECISIONS)
    pairs = [(s, c) for s, c in product(schedules, clips) if c.by != "global" or has_time(mode, s)]
    return [Case(schedule, clip=clip, dtype=next(dtypes)) for schedule, clip in pairs]


def clips_of(mode):
    loose = [Clip(LOOSE, by) for by in NORMS]
    if mode == "one_device":
        made = [cyclic(1), *rings(3)[1::2], cyclic(4, slack=2), cyclic_pipeline(3, 2, 2), cyclic_pipeline(3, 4, 3)]
        both = clipped(mode, made, *EVERY_CLIP, *loose)
        both += [Case(cyclic(3, slack=3), clip=clip, optimizer="adagrad", **LATE) for clip in EVERY_CLIP]
        return both + clipped(mode, [gpipe(3, 2)], *EVERY_CLIP)
    if mode == "ring":
        made = [cyclic(1), *rings(2)[::2], *rings(3)[1::2], *rings(4)[2::2],
                simultaneous(3, 2), delayed_all_reduce(3, 2)]  # fmt: skip
        slow = product((cyclic(3, slack=1), cyclic(4, 5, slack=4)), LOOKED_AT, EVERY_CLIP)
        return [
            *clipped(mode, made, *EVERY_CLIP), *clipped(mode, [cyclic(4, slack=2), cyclic(3, 6, 3)], *loose),
            *(Case(schedule, clip=clip, **option) for schedule, option, clip in slow),
        ]  # fmt: skip
    if mode == "zero_ring":
        made = [cyclic(1), *rings(2)[::2], *rings(3)[1::3], *rings(4)[5:], simultaneous(3, 2)]
        bounds = cycle((TIGHT, TIGHT, LOOSE))
        found = [replace(one, clip=Clip(next(bounds), one.clip.by)) for one in clipped(mode, made, *EVERY_CLIP)]
        return found + [Case(cyclic(4, 5, slack=4), clip=clip, optimizer="adamw", **LATE) for clip in EVERY_CLIP]
    if mode == "pipeline":
        made = [cyclic_pipeline(*one) for one in ((1, 2), (2, 1, 1), (2, 4, 1), (3, 2, 2), (4, 4, 3), (4, 3, 3))]
        slow = product(LOOKED_AT, EVERY_CLIP)
        return [
            *clipped("one_device", made, Clip(LOOSE), *EVERY_CLIP), *clipped("one_device", [gpipe(3, 2)], *EVERY_CLIP),
            *(Case(cyclic_pipeline(k, m), clip=Clip(TIGHT, "previous")) for k, m in ((2, 1), (4, 3), (3, 6))),
            *(Case(cyclic_pipeline(3, 3, 2), clip=clip, **option) for option, clip in slow),
        ]  # fmt: skip
    slow = product(({"drains": (2,), "settles": (1,)}, {"optimizer": "adamw", "drains": (3,), "settles": (4,)}),
                   EVERY_CLIP)  # fmt: skip
    return [
        *(Case(cyclic(n, slack=n), clip=Clip(LOOSE)) for n in (1, 2)),
        *(Case(cyclic(3, slack=1), clip=clip, dtype=torch.float32) for clip in EVERY_CLIP),
        *(Case(cyclic(n), clip=Clip(TIGHT, by)) for n in (2, 3) for by in ("stage", "previous")),
        *(Case(cyclic(3, slack=3), clip=clip, **option) for option, clip in slow),
    ]


def under_autocast(mode):
    plain, around = {"model": {"norm": None}}, {"autocast": "everything"}
    if mode == "one_device":
        parts = [{"model": {"make": with_careful_parts}, "recompute": frozenset(again)} for again in ((), (0, 1, 2))]
        return [Case(cyclic(3, slack=1), **{**HALF, **one, **other}) for one in parts for other in ({}, around)]
    if mode == "pipeline":
        options = [{}, plain, {"recompute": frozenset({0, 1}), "drains": (2,), "settles": (3,)},
                   {"clip": Clip(TIGHT, "previous"), "model": BATCH_NORM}]  # fmt: skip
        return [Case(s, **{**HALF, **one}) for s in (cyclic_pipeline(3, 2), gpipe(2, 3)) for one in options]
    if mode == "shared":
        options = [{}, {**plain, "settles": (3,)}, {"recompute": frozenset({0, 1}), "drains": (2,)}]
        return [Case(cyclic(3, slack=1), **{**HALF, **one}) for one in options]
    options = [{}, {**plain, "drains": (2,)}, {"clip": Clip(TIGHT, "previous"), "settles": (3,)}]
    pairs = product((cyclic(3), cyclic(2, 4, 1)), options, ({}, around))
    return [Case(schedule, **{**HALF, **one, **other}) for schedule, one, other in pairs]


@pytest.mark.parametrize("mode", modes.MODES)
def test_it_trains_as_the_reference_does_bit_for_bit(crew, mode):
    """In float32 and float64 by turns; every third with dropout, on processes, the others in threads."""
    every = [Case(one, dtype=dtype) for one, dtype in zip(SCHEDULES[mode], cycle(PRECISIONS))]
    on_processes = every if mode == "one_device" else every[::3]
    compare(crew, mode, on_processes)
    compare_in_threads(mode, [one for one in every if one not in on_processes])


@pytest.mark.parametrize("mode", OTHERS)
def test_schedules_that_are_not_cyclic_are_carried_out_too(crew, mode):
    compare(crew, mode, [Case(one) for one in OTHERS[mode]])


@pytest.mark.parametrize("mode", modes.MODES)
def test_drains_settling_buffers_recomputation_and_optimizers_are_the_references(crew, mode):
    compare(crew, mode, BETWEEN_STEPS[mode])


@pytest.mark.parametrize("mode", modes.MODES)
def test_clipping_is_the_references_and_keeps_to_the_step_through_drains_and_looks(mode):
    compare_in_threads(mode, clips_of(mode))


@pytest.mark.parametrize("mode", modes.MODES)
def test_under_autocast_the_weights_are_the_references(mode):
    """Around everything, torch would go on using its casts of the weights of the first step."""
    compare_in_threads(mode, under_autocast(mode))


RACES = {  # options of a race, and the schedules
    "ring": ({"settles": (2,)}, [*rings(3)[::2], cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)]),
    "zero_ring": (
        {"settles": (2,), "drains": (3,), "clip": Clip(TIGHT, "previous")},
        [*rings(3)[::2], cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)],
    ),
    "pipeline": ({"settles": (3,)}, [cyclic_pipeline(3, 2), cyclic_pipeline(3, 5), gpipe(3, 4), one_f_one_b(3, 4)]),
    "shared": ({"settles": (2,), "drains": (3,)}, [cyclic(3, slack=1), cyclic(4, slack=2)]),
}
CLIPPED_RACES = {
    "ring": [cyclic(5, slack=2), cyclic(4, 7, 4), cyclic(3, 2, 1)],
    "pipeline": [cyclic_pipeline(3, 3, 3)],
    "shared": [cyclic(4, slack=2)],
}


@pytest.mark.parametrize("rule", ["gloo", "nccl"])
@pytest.mark.parametrize("mode", RACES)
def test_nothing_depends_on_who_is_late_or_by_which_rule_messages_move_and_nobody_waits_for_ever(mode, rule):
    options, schedules = RACES[mode]
    model = BATCH_NORM if mode == "shared" else {}
    clips = [None, Clip(TIGHT, "previous"), Clip(LOOSE)] if mode == "shared" else [options.get("clip")]
    races = [Case(s, rule=rule, model=model, **{**options, "clip": clip}) for s, clip in product(schedules, clips)]
    compare_in_threads(mode, races, is_late=True)


@pytest.mark.parametrize("mode", CLIPPED_RACES)
def test_norms_do_not_depend_on_who_is_late(mode):
    rules = ("gloo", "nccl") if mode == "pipeline" else ("gloo",)
    every = product(CLIPPED_RACES[mode], EVERY_CLIP, rules)
    races = [Case(schedule, clip=clip, rule=rule, settles=(3,)) for schedule, clip, rule in every]
    compare_in_threads(mode, races, is_late=True)
