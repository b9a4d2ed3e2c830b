"""Habits of a user's loop under a schedule that owns it: refused by name, and the run is saved and closed as ever."""

import warnings

import pytest
import torch
from plain_loop import apart, state_of
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss
from torch import nn

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


def plan_of(text, processes, habit=None):
    """For the model as it is at first, or after the habit."""
    model = begun()
    if habit is not None:
        habit(model, torch.optim.SGD(body_alone(model), lr=0.1))
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(model, pair_loss, batches, processes, schedule=text)


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


def begun():
    """A model whose first bias is frozen."""
    model = chain()
    model[0][0].bias.requires_grad_(False)
    return model


def body_alone(model):
    """What the optimizer is given at first: all but the last block."""
    return model[:3].parameters()


def adds_a_group(model, optimizer):
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.05})


def freezes(model, optimizer):
    model[1].requires_grad_(False)


def unfreezes(model, optimizer):
    model[0][0].bias.requires_grad_(True)


def doubled(gradient):
    return 2 * gradient


def hooks_a_gradient(model, optimizer):
    model[2][0].weight.register_hook(doubled)


def steps_in_the_backward(model, optimizer):
    for parameter in model[1].parameters():
        parameter.register_post_accumulate_grad_hook(doubled)


def hooks_the_step(model, optimizer):
    optimizer.register_step_pre_hook(quartered)


def hooks_after_the_step(model, optimizer):
    optimizer.register_step_post_hook(quartered)


def quartered(optimizer, args, kwargs):
    """Of what must not be stepped with it: the weights would tell."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.div_(4)


def nothing(model, optimizer):
    pass


def interrupted(rank, world, plan, habit, anew, folder):
    """What a step says after the habit, twice; what the run tells and leaves; the optimizer's groups, and
    which parameters are trained, after close. A new plan then goes on, or is refused for the same reason."""
    model = begun()
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
    trained = [p.requires_grad for p in model.parameters()]
    state = state_of(model)
    if habit in AT_ATTACH:
        said.append(refusal(started, anew, model, optimizer))
        return said, (seen, held, groups, state), left, trained
    again = started(anew, model, optimizer)
    step(again, model, optimizer, STEPS)
    again.close()
    return said, (seen, held, groups, state), left, trained


HABITS = {
    adds_a_group: "SGD has 2 parameter groups, when the run began it had 1; call run.close(), add",
    freezes: "1.0.weight was frozen since the run began, which its steps would not follow (likewise 1 more); call run.",
    unfreezes: "0.0.bias was unfrozen since the run began, which its steps would not follow; call run.close(), set",
    hooks_a_gradient: "2.0.weight has a gradient hook (doubled), which no step would call; take it off, or keep a loop",
    steps_in_the_backward: "1.0.weight has a gradient hook (doubled) (and so have 1 more), which no step would call",
    hooks_the_step: "SGD has a step hook (quartered), which would not run once a step with all its gradients",
    hooks_after_the_step: "SGD has a step hook (quartered), which would not run once a step with all its",
}
# Every schedule is asked of every other one, gpipe and a loop of the user's own of all.
ASKED = {
    text: [*HABITS] if text in ("gpipe(micro_batches=2)", OWN) else [*HABITS][number % 2 :: 2]
    for number, text in enumerate(EVERY)
}
OF_RUN_STEP = (hooks_a_gradient, steps_in_the_backward)  # autograd calls them in a loop of the user's own
AT_ATTACH = (*OF_RUN_STEP, hooks_the_step, hooks_after_the_step)


@pytest.mark.parametrize("text", EVERY)
def test_what_a_loop_changes_between_steps_is_refused_and_is_there_after_close(crew, text, tmp_path):
    processes = EVERY[text]
    plan = plan_of(text, processes)
    usual = crew(processes).run(interrupted, plan, nothing, plan, tmp_path / "usual")
    for habit in ASKED[text]:
        wanted = HABITS[habit]
        if text == OWN and habit in OF_RUN_STEP:
            continue
        answers = crew(processes).run(
            interrupted, plan, habit, plan_of(text, processes, habit), tmp_path / habit.__name__
        )
        for rank, ((said, got, left, trained), (_, want, *_)) in enumerate(zip(answers, usual, strict=True)):
            begins = f"ValueError: rank {rank}: under schedule {plan.schedule.name}: {wanted}"
            assert all(one.startswith(begins) for one in said[:2]), said
            at_attach = f"ValueError: attach: rank 0: schedule {plan.schedule.name} owns the loop, and {wanted}"
            assert len(said) == 2 + (habit in AT_ATTACH) and all(one.startswith(at_attach) for one in said[2:]), said
            assert left == ([6, 2] if habit is adds_a_group else [6])
            model = begun()
            habit(model, torch.optim.SGD(body_alone(model), lr=0.1))
            assert trained == [p.requires_grad for p in model.parameters()]
            assert got[:3] == want[:3] and apart(got[3], want[3]) == {}


class Skip(nn.Module):
    """No chain, so it is traced; with dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = chain(0.5), chain(0.5)

    def forward(self, value):
        return self.second(self.first(value)) + value


def switched(rank, world, plan, way, *modes):
    """What steps say after model.train(mode), of each mode, the first at attach; what was warned of; weights."""
    model, said = way(), []
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.train(modes[0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = started(plan, model, optimizer)
    for number, mode in enumerate(modes):
        model.train(mode)
        said.append(refusal(step, run, model, optimizer, number))
        run.evaluate([pair_batch(9, 9)], lambda model, batch: {"loss": float(pair_loss(model, batch))})
    run.close()
    return said, [str(one.message) for one in warned if "eval mode" in str(one.message)]


def skip():
    torch.manual_seed(3)
    return Skip().double()


@pytest.mark.parametrize("text", ["gpipe(micro_batches=2, points=['second'])", "ring(points=['second'])"])
def test_a_traced_model_in_another_mode_is_refused_and_a_chain_is_not(crew, text):
    batches = [pair_batch(0, number) for number in range(2)]
    plan = face.plan_for(skip(), pair_loss, batches, 2, schedule=text)
    for rank, (said, warned) in enumerate(crew(2).run(switched, plan, skip, True, False, True)):
        who = (
            f"ValueError: rank {rank}: under schedule {plan.schedule.name}: the model is in eval mode now, but its for"
        )
        assert said[0] == said[2] == "" and said[1].startswith(who) and warned == []
    for rank, (said, warned) in enumerate(crew(2).run(switched, plan, skip, False, True, False)):
        assert said[0] == said[2] == "" and "traced in eval mode, and is run so; call eval() as before" in said[1]
        assert len(warned) == (rank == 0) and all("model.train() before attach" in one for one in warned)
    chained = face.plan_for(chain(0.5), pair_loss, batches, 2, schedule=text.replace("'second'", "'2'"))
    assert crew(2).run(switched, chained, dropping_chain, True, False, True) == [(["", "", ""], [])] * 2


def dropping_chain():
    return chain(0.5)


class Counts(torch.optim.Optimizer):
    """Keeps a number in its groups, as Prodigy does; every so many steps."""

    every = 1

    def __init__(self, groups, lr, **_):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            if self.calls % self.every == 0:
                group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad


class Moves(torch.optim.SGD):
    """Changes a tensor among its options in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["distance"].add_(1)
        return super().step(closure)


class Seldom(Counts):
    every = 5  # more than a trial sees


def counted(rank, world, plan, kind):
    """What attach says, and the first step that says something."""
    model = chain()
    groups = [{"params": list(part.parameters()), "distance": torch.zeros(1)} for part in model]
    optimizer = kind(groups, lr=torch.tensor(0.1), foreach=False)
    run = []
    said = refusal(lambda: run.append(started(plan, model, optimizer)))
    steps = (refusal(step, run[0], model, optimizer, number) for number in range(6)) if run else ()
    found = next(filter(None, steps), "")
    if run and not found:
        run[0].close()
    return said, found, [group["distance"].item() for group in optimizer.param_groups]


@pytest.mark.parametrize("text", EVERY)
def test_an_optimizer_that_changes_its_options_is_refused_and_one_that_does_not_is_not(crew, text):
    processes = EVERY[text]
    plan = face.plan_for(chain(), pair_loss, [pair_batch(0, number) for number in range(3)], processes, schedule=text)
    assert crew(processes).run(counted, plan, torch.optim.SGD) == [("", "", [0.0] * 4)] * processes
    for kind, options in {Counts: "count", Moves: "distance"}.items():
        wanted = f"owns the loop, and {kind.__name__} changes its options {options} when it steps, as a trial shows"
        for said, _, distances in crew(processes).run(counted, plan, kind):
            assert wanted in said and distances == [0.0] * 4


@pytest.mark.parametrize("text", ["one_device(micro_batches=2, stages=2)", OWN])
def test_one_whose_trial_shows_nothing_is_refused_when_it_happens(crew, text):
    processes = EVERY.get(text, 1)
    plan = face.plan_for(chain(), pair_loss, [pair_batch(0, number) for number in range(2)], processes, schedule=text)
    for said, found, _ in crew(processes).run(counted, plan, Seldom):
        assert said == "" and "Seldom changed its options count by itself" in found
