"""A pipeline on each of several replicas is one process over all micro-batches, to the bit where sums keep order."""

import pytest
import torch
from plain_loop import gradients_of, same, state_of
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss

import armillary
import face
from armillary.cli.names import find, small
from armillary.planning.request import PlanRequest
from armillary.plans import Choice
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from armillary.stages.reducer import Reducer

STEPS, COUNT = 4, 6  # micro-batches of a step, those of all replicas
TIGHT = 0.05
SCHEDULES = ("gpipe(stages=2, micro_batches={})", "one_f_one_b(stages=2, micro_batches={}, recompute=[0])")


def plan_of(text, processes):
    return face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(processes)], processes, schedule=text)


def steps_of(first=0, last=STEPS):
    return [[pair_batch(step, number) for number in range(COUNT)] for step in range(first, last)]


def plain_loop(replicas, clip=0.0, steps=STEPS):
    """Each replica's mean of its own micro-batches, then the mean over replicas, in their order; weights, losses."""
    model = chain()
    optimizer, told = OPTIMIZERS["momentum"](model.parameters()), []
    each = COUNT // replicas
    for batches in steps_of(0, steps):
        seen = [gradients_of(model, pair_loss, batch) for batch in batches]
        told.append([value for value, _ in seen])
        for name, parameter in model.named_parameters():
            means = []
            for replica in range(replicas):
                total, *others = [found[name] for _, found in seen[replica * each :][:each]]
                for other in others:
                    total = total + other
                means.append(total / each)
            parameter.grad = sum(means[1:], means[0]) / replicas
        if clip:
            clipped(model, clip)
        optimizer.step()
    return state_of(model), told


def clipped(model, most):
    """As torch does, squares added stage by stage, the last of two first."""
    square = torch.zeros((), dtype=torch.float64)
    for part in (model[2:], model[:2]):
        own = torch.zeros((), dtype=torch.float64)
        for parameter in part.parameters():
            own = own + parameter.grad.square().sum()
        square = square + own
    assert square.sqrt() > most
    for parameter in model.parameters():
        parameter.grad = parameter.grad * (most / (square.sqrt() + 1e-6))


def begun(plan, check_order=False):
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    more = {"check_order": check_order} if check_order else {}
    return face.start(plan, model, optimizer, pair_loss, pair_batch(0, 0), **more)


def trained(rank, world, plans):
    """Of every plan: weights, losses, mean bytes a step sends."""
    found = []
    for plan in plans:
        run = begun(plan, check_order=world == 4)
        for batches in steps_of():
            face.step(run, face.own(run, batches))
        got = face.weights(run)
        found.append((got, face.losses(run), plan))
        face.close(run)
    return found


def test_two_replicas_of_two_stages_are_one_process_bit_for_bit(crew):
    texts = [text.format(COUNT // 2) for text in SCHEDULES]
    texts.append(f"gpipe(stages=2, micro_batches={COUNT // 2}, clip_norm={TIGHT})")
    plans = [plan_of(text, 4) for text in texts]
    assert {(str(plan.mesh), plan.departures) for plan in plans} == {("data 2 x stage 2", ())}
    answers = crew(4).run(trained, plans)
    for number in range(len(plans)):
        weights, losses = plain_loop(2, TIGHT if number == 2 else 0.0)
        for rank, answer in enumerate(answers):
            got, told, _ = answer[number]
            assert same(got, weights), (texts[number], rank)
            own = slice(COUNT // 2) if rank < 2 else slice(COUNT // 2, COUNT)
            assert [list(step) for step in told] == [step[own] for step in losses]


def test_three_replicas_are_to_rounding_and_other_means_are_not(crew):
    (plan,) = plans = [plan_of("one_f_one_b(stages=2, micro_batches=2)", 6)]
    assert str(plan.mesh) == "data 3 x stage 2"
    weights, _ = plain_loop(3)
    for ((got, _, _),) in crew(6).run(trained, plans):
        assert apart_by(got, weights) < 1e-10
    assert apart_by(plain_loop(2)[0], weights) < 1e-10  # another order of the same sums
    assert apart_by(plain_loop(3, steps=STEPS - 1)[0], weights) > 1e-3


def apart_by(these, those):
    return max(float((these[name] - those[name]).abs().max()) for name in those)


def sent_in_steps(rank, world, plan):
    """Bytes of four steps with others before them, which bring the forms of messages."""
    run, sent = begun(plan), []
    for steps in (steps_of(0, 3), steps_of(3, 7)):
        for batches in steps:
            face.step(run, face.own(run, batches))
        sent.append(face.count_bytes(run))
    face.close(run)
    return sent[1]


def test_replicas_send_what_the_plan_says(crew):
    plan = plan_of("one_f_one_b(stages=2, micro_batches=3)", 4)
    sent = crew(4).run(sent_in_steps, plan)
    assert sum(sent) / 4 == pytest.approx(4 * face.sent_bytes_planned(plan), rel=1e-9)
    assert face.sent_bytes_planned(plan) > face.sent_bytes_planned(plan_of("one_f_one_b(micro_batches=3)", 2))


def verified(rank, world, text):
    workload = find("vision", {**small("vision"), "architecture": "vit", "width": 16, "depth": 2})
    found = verify_workload(workload, steps=4, request=JobRequest(PlanRequest(schedule=Choice.parse(text))))
    return found.tolerance, [one.name for one in found.differences if one.verdict != "equal"]


def test_stale_pipelines_on_two_replicas_are_their_reference_bit_for_bit(crew):
    for text in ("pipeline(stages=2)", "pipeline(stages=2, micro_batches=3, slack=1, clip_norm=0.5, clip_by=previous)"):
        assert crew(4).run(verified, text) == [(0.0, [])] * 4


# planted faults


def divided_by_ranks(rank, world, plans):
    """As `trained`, but the mean over replicas divides by all ranks."""
    scale, Reducer._scale = Reducer._scale, property(lambda reducer: 1.0 / world)
    try:
        return trained(rank, world, plans)
    finally:
        Reducer._scale = scale


def test_a_mean_that_divides_by_ranks_is_seen(crew):
    plans = [plan_of("gpipe(stages=2, micro_batches=3)", 4)]
    weights, _ = plain_loop(2)
    for ((got, _, _),) in crew(4).run(divided_by_ranks, plans):
        assert not same(got, weights)


def refused(rank, world, plan, numbers):
    """numbers: of the micro-batches, by rank."""
    run = begun(plan)
    mine = [pair_batch(0, number) for number in numbers[rank]]
    with pytest.raises(ValueError, match="hand in the same micro-batches") as error:
        face.step(run, mine)
    run.run._engine.hooks.close()
    return str(error.value)


@pytest.mark.parametrize(
    ("numbers", "ranks"),
    [([[0], [1], [2], [3]], "ranks 0 and 1"), ([[0], [0], [1], [2]], "ranks 2 and 3")],
    ids=["sharded by rank", "stages of the second replica"],
)
def test_stages_of_one_replica_that_are_given_different_batches_are_told_so(crew, numbers, ranks):
    plan = plan_of("gpipe(stages=2, micro_batches=1)", 4)
    for said in crew(4).run(refused, plan, numbers):
        assert f"{ranks} hand in the same micro-batches" in said and "give every rank the same (run.shard does)" in said


def told_of_the_same(rank, world, plan):
    run = begun(plan)
    for step in range(2):
        face.step(run, [pair_batch(step, 0)])
    with pytest.raises(ValueError, match="same data") as error:
        face.step(run, [pair_batch(2, 0)])
    run.run._engine.hooks.close()
    return str(error.value)


def test_replicas_that_are_given_the_same_data_are_told_so(crew):
    plan = plan_of("gpipe(stages=2, micro_batches=1)", 4)
    for said in crew(4).run(told_of_the_same, plan):
        assert "ranks 0, 2 were given the same data in each of their first 3 steps" in said


def sharded(rank, world, plan):
    run = begun(plan)
    seen = [int(batch) for batch in face.shard(run, torch.arange(8))]
    face.close(run)
    return seen


def test_a_shard_is_a_replicas(crew):
    plan = plan_of("gpipe(stages=2, micro_batches=1)", 4)
    assert crew(4).run(sharded, plan) == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


# other meshes, and what does not go


def handed_over(rank, world, plans, folder):
    """Two steps under each plan, from what the one before saved; the last one's weights."""
    path = None
    for number, plan in enumerate(plans):
        run = begun(plan)
        if path is not None:
            face.load(run, path)
        for batches in steps_of(2 * number, 2 * number + 2):
            face.step(run, face.own(run, batches[:4]))
        path = face.save(run, folder / str(number))
        got = face.weights(run)
        face.close(run)
    return got


def test_what_was_saved_on_one_mesh_goes_on_under_another(crew, tmp_path):
    texts = ("gpipe(stages=1, micro_batches=1)", "one_f_one_b(stages=2, micro_batches=2)", "gpipe(micro_batches=4)")
    four, two, one = (plan_of(text, 4) for text in texts)
    assert [str(plan.mesh) for plan in (four, two, one)] == ["data 4 x stage 1", "data 2 x stage 2", "stage 4"]
    for number, plans in enumerate(((four, two, one), (one, two, four))):
        model = chain()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        for batches in steps_of(0, 2 * len(plans)):
            (sum(pair_loss(model, batch) for batch in batches[:4]) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        (tmp_path / str(number)).mkdir()
        for got in crew(4).run(handed_over, plans, tmp_path / str(number)):
            assert apart_by(got, state_of(model)) < 1e-10


def test_what_does_not_go_on_several_replicas_is_refused_by_name():
    with pytest.raises(ValueError, match="gpipe on 4 processes has stages=4, got 3"):
        plan_of("gpipe(stages=3)", 4)
    with pytest.raises(ValueError, match="2 replicas of 2 processes know no corrections"):
        plan_of("pipeline(stages=2, corrections=['nesterov'])", 4)
    plan = plan_of("gpipe(stages=2)", 4)
    assert armillary.Plan.from_json(plan.to_json()) == plan
    said = str(plan)
    assert "2 replicas of 2 processes, each with 2 micro-batches of its own a step" in said
    assert plan.compute_seconds > 0 and all(face.exchanges_of(plan).values())
