"""Laws of clipping under schedules: torch's factor, and exact only where nobody reads before the norm is known."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from armillary.plans import Choice
from armillary.schedules import Clip, read
from armillary.schedules.clipping import square_of_stage, square_of_step
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.routes import (
    carrier,
    closing,
    owner_of,
    refuse_in_pipeline,
    refuse_in_ring,
    refuse_on_one_device,
    sum_path,
)
from armillary.schedules.simultaneous import simultaneous
from schedule_messages import pipeline_messages, ring_messages

EXACT, BY_STAGE, PREVIOUS = Clip(1.0, "global"), Clip(1.0, "stage"), Clip(1.0, "previous")

cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
rings = st.builds(
    lambda n, pairs, slack: cyclic(n, slack=slack, costs=pairs),
    st.integers(1, 6),
    st.lists(st.tuples(cost, cost), min_size=1, max_size=6),
    st.integers(0, 7),
)
pipelines = st.builds(
    lambda k, more, slack: cyclic_pipeline(k, max(1, k - 1 + more), slack),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 12),
)


def is_refused(refuse, schedule, clip=EXACT):
    try:
        refuse(schedule, clip)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e9])
def test_the_factor_is_torchs(max_norm):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), (2, 3))]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    before = [parameter.grad.clone() for parameter in parameters]
    squares = {0: square_of_stage(before[:1]), 1: square_of_stage(before[1:])}
    factor = Clip(max_norm).factor(square_of_step(squares))
    nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, gradient in zip(parameters, before):
        assert torch.allclose(parameter.grad, gradient * factor, rtol=1e-14, atol=0)
    assert (factor == 1.0) == (max_norm == 1e9)


def test_a_square_does_not_depend_on_how_a_gradient_lies_in_memory():
    wide = torch.randn(64, 65, generator=torch.Generator().manual_seed(0))
    assert torch.equal(square_of_stage([wide.t().contiguous()]), square_of_stage([wide.t()]))


def test_nonsense_is_refused():
    for norm, by in ((0.0, "global"), (-1.0, "stage"), (float("nan"), "stage"), (float("inf"), "stage"), (1.0, "all")):
        with pytest.raises(ValueError, match="clip wants a positive norm and one of global, stage, previous"):
            Clip(norm, by)
    with pytest.raises(ValueError, match="clip_by=stage wants a clip_norm"):
        read(Choice("ring", {"clip_by": "stage"}), 2)


@given(rings)
def test_on_one_device_the_norm_is_there_when_weights_are_read_or_it_is_refused(made):
    """By brute force over three steps: which forward reads version 1, and when the last gradient of step 0 is there."""
    known = max(made.action("B", m, j).end for m in range(made.micro_batches) for j in range(made.stages))
    reads = [
        made.action("F", m, j).start + step * made.period
        for step in range(3)
        for m in range(made.micro_batches)
        for j in range(made.stages)
        if made.version((step, m, j)) == 1
    ]
    assert is_refused(refuse_on_one_device, made) == (min(reads) < known)


@given(rings)
def test_in_a_ring_a_home_steps_after_the_norm_is_known_and_before_the_weights_are_wanted(made):
    if is_refused(refuse_in_ring, made):
        return
    known = made.action("B", made.workers - 1, 0).end - made.period
    for stage in range(made.stages):
        reads = [
            made.action("F", m, stage).start + (step - 1) * made.period
            for step in range(3)
            for m in range(made.workers)
            if made.version((step, m, stage)) == 1
        ]
        assert known <= closing(made, stage, EXACT).tick <= min(reads)


@given(rings, st.sampled_from([EXACT, PREVIOUS]))
def test_no_message_of_a_clipped_ring_is_needed_before_it_is_sent(made, clip):
    if is_refused(refuse_in_ring, made, clip):
        assert clip == EXACT
        return
    found = ring_messages(made, clip)
    assert all(message.lag >= 0 for message in found)
    last = made.workers - 1
    norms = [message for message in found if message.content == "norm"]
    assert Counter((m.sender, m.receiver) for m in norms) == Counter(
        {(last, other): 1 for other in {owner_of(made, j) for j in range(made.stages)} - {last}}
    )
    for norm in norms:
        stages = [j for j in range(made.stages) if owner_of(made, j) == norm.receiver]
        first = min(closing(made, j, clip).tick for j in stages)
        assert closing(made, norm.stage, clip).tick == first
        age = 0 if clip == EXACT else 1
        assert norm.tick + norm.lag == first + (1 + age) * made.period
        assert norm.lag >= made.action("B", last, 0).ticks  # the sending action is over


@given(rings)
def test_the_last_worker_makes_every_sum_where_norms_are_wanted(made):
    for stage in range(made.stages):
        assert sum_path(made, stage, PREVIOUS) == tuple(range(made.workers))
        assert sum_path(made, stage, BY_STAGE) == sum_path(made, stage)


@given(st.integers(1, 6), st.integers(1, 2), st.integers(0, 12))
def test_equal_stages_clip_exactly_from_half_the_workers_slack_on(n, times, slack):
    """stage j's first reader is fresh 2 slack - j slots after the norm is known, so (N - 1) / 2 is enough."""
    made = cyclic(n, n * times, slack)
    for refuse in (refuse_on_one_device, refuse_in_ring):
        assert is_refused(refuse, made) == (2 * slack < n - 1)


@given(pipelines)
def test_in_a_pipeline_the_norm_passes_every_stage_before_weights_that_wait_for_it_are_read(made):
    """By brute force: up the stages one tick each, from when the first stage's last backward is over."""
    known = max(made.action("B", m, 0).end for m in range(made.micro_batches))
    late = [
        (m, j)
        for step in range(3)
        for m in range(made.micro_batches)
        for j in range(made.stages)
        if made.version((step, m, j)) == 1 and made.action("F", m, j).start + step * made.period < known + j
    ]
    assert is_refused(refuse_in_pipeline, made) == bool(late)


@given(pipelines)
def test_a_pipelines_norm_goes_down_behind_the_last_gradient_and_up_ahead_of_its_carrier(made):
    plain, found = pipeline_messages(made), pipeline_messages(made, PREVIOUS)
    norms = [message for message in found if message.content == "norm"]
    assert sorted([*plain, *norms]) == found and all(norm.lag >= 0 for norm in norms)
    down = [(norm.sender, norm.receiver) for norm in norms if norm.sender > norm.receiver]
    up = [(norm.sender, norm.receiver) for norm in norms if norm.sender < norm.receiver]
    assert down == [(j, j - 1) for j in range(made.stages - 1, 0, -1)] and up == [b[::-1] for b in down[::-1]]
    assert carrier(made) <= made.micro_batches  # so the norm of the step before is there when a step's gradient is used


@pytest.mark.parametrize(
    ("name", "options", "enough"),
    [
        ("one_device", {"micro_batches": 4}, 2),
        ("ring", {}, 2),
        ("zero_ring", {}, 2),
        ("pipeline", {}, 3),
    ],
)
def test_exact_clipping_without_time_is_refused_with_the_slack_that_is_enough(name, options, enough):
    processes = 1 if name == "one_device" else 4
    wish = {**options, "clip_norm": 1.0}
    with pytest.raises(ValueError, match=rf"norm.*clip by stage or previous \(slack={enough} is enough\)"):
        read(Choice(name, wish), processes)
    assert read(Choice(name, {**wish, "slack": enough}), processes).clip == Clip(1.0, "global")
    for by in ("stage", "previous"):
        made = read(Choice(name, {**wish, "clip_by": by}), processes)
        assert made.clip == Clip(1.0, by)
        assert read(Choice(name, made.as_options()), processes) == made
    assert "clip_norm" not in read(Choice(name, options), processes).as_options()


def test_a_flush_pipeline_has_time_with_no_slack_to_offer():
    for name in ("gpipe", "one_f_one_b"):
        assert read(Choice(name, {"clip_norm": 1.0}), 4).clip == Clip(1.0, "global")


def test_a_synchronous_schedule_has_time():
    for refuse in (refuse_on_one_device, refuse_in_ring):
        assert not is_refused(refuse, simultaneous(3, 3))
