"""Habits of a user's loop under a schedule that owns it: refused by name, and the run is saved and closed as ever."""

import pytest
from plain_loop import apart, state_of
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss

import armillary
import face

STEPS, COUNT = 3, 2  # before the habit; micro-batches of a step
# schedule -> processes
SCHEDULES = {
    "accumulation(micro_batches=2)": 1,
    "gpipe(micro_batches=2)": 2,
    "pipeline(micro_batches=2)": 2,
    "zero_ring(stages=2)": 2,
    "shared_stages": 3,
}
OWN = "delayed_all_reduce"  # behind a loop of the user's own
EVERY = {**SCHEDULES, OWN: 2}


def plan_of(text, processes, begin=chain):
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(begin(), pair_loss, batches, processes, schedule=text)


def started(plan, model, optimizer):
    more = {} if plan.schedule.name == OWN else {"loss": pair_loss, "example": pair_batch(0, 0)}
    return armillary.attach(plan, model, optimizer, **more)


def step(run, model, optimizer, number):
    """One training step, as the schedule is stepped."""
    mine = [pair_batch(number, one) for one in range(COUNT)]
    if run.plan.schedule.name == OWN:
        pair_loss(model, mine[run.rank]).backward()
        optimizer.step()
    else:
        each = COUNT // run.plan.mesh.data_coordinates
        run.step(mine[each * run.plan.mesh.data_coordinate(run.rank) :][:each])


def refusal(call, *given):
    """What it says; empty where it does its work."""
    try:
        call(*given)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def body_alone(model):
    """What the optimizer is given at first: all but the last block."""
    return model[:3].parameters()


def adds_a_group(model, optimizer):
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.05})


def nothing(model, optimizer):
    pass


def interrupted(rank, world, plan, habit, folder):
    """What a step says after the habit, twice; rank 0's exported groups and state; what is left after load and close;
    and what a step under a run attached anew says."""
    model = chain()
    optimizer = OPTIMIZERS["momentum"](body_alone(model))
    run = started(plan, model, optimizer)
    for number in range(STEPS):
        step(run, model, optimizer, number)
    habit(model, optimizer)
    said = [refusal(step, run, model, optimizer, STEPS) for _ in range(2 * (habit is not nothing))]
    seen = run.evaluate([pair_batch(9, 9)], lambda model, batch: {"loss": float(pair_loss(model, batch))})
    held = len(run.report().lines)
    run.load(run.save(folder))
    exported = run.export()
    groups = exported and [len(group["params"]) for group in exported["optimizer"]["param_groups"]]
    run.close()
    left = [len(group["params"]) for group in optimizer.param_groups]
    state = state_of(model)
    again = started(plan, model, optimizer)
    anew = refusal(step, again, model, optimizer, STEPS)
    again.close()
    return said, (seen, held, groups, state), left, anew


@pytest.mark.parametrize("text", EVERY)
def test_a_group_added_between_steps_is_refused_and_is_there_after_close(crew, text, tmp_path):
    processes = EVERY[text]
    plan = plan_of(text, processes)
    usual = crew(processes).run(interrupted, plan, nothing, tmp_path / "usual")
    answers = crew(processes).run(interrupted, plan, adds_a_group, tmp_path / "added")
    for rank, ((said, got, left, anew), (_, want, _, _)) in enumerate(zip(answers, usual, strict=True)):
        for one in said:
            assert one.startswith(f"ValueError: rank {rank}: under schedule {plan.schedule.name}: SGD has 2 parameter")
            assert "call run.close()" in one and "attach again" in one
        assert len(said) == 2 and left == [6, 2] and anew == ""
        assert got[:3] == want[:3] and apart(got[3], want[3]) == {}
