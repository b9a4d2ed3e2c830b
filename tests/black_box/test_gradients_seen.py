"""What a loop sees of gradients, held to what DistributedDataParallel shows: in hooks, kept, and stepped early."""

import pytest
import torch
import torch.distributed as dist
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import armillary
import face


def mean_plan(schedule="simultaneous", workers=2, **asked):
    batches = [pair_batch(0, number) for number in range(workers)]
    return face.plan_for(chain(), pair_loss, batches, workers, schedule=schedule, **asked)


def begun(plan, model, optimizer=None):
    return armillary.attach(plan, model, optimizer or OPTIMIZERS["sgd"](model.parameters()), report_after=None)


def said_by(attempt):
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def backward(model, rank, step=0):
    pair_loss(model, pair_batch(step, rank)).backward()


# Hooks


def clamped(parameter):
    parameter.grad.clamp_(-0.001, 0.001)


def replaced(parameter):
    parameter.grad = parameter.grad * 3


def normed(parameter):
    parameter.grad.div_(parameter.grad.norm() + 1)


def gradient_clamped(gradient):
    return gradient.clamp(-0.001, 0.001)


def on_accumulators(parameter):
    """Hooks that see a gradient before it is added to `.grad`."""
    parameter.register_hook(gradient_clamped)


HOOKS = {
    "clamps in place": lambda p: p.register_post_accumulate_grad_hook(clamped),
    "puts another tensor": lambda p: p.register_post_accumulate_grad_hook(replaced),
    "divides by its norm": lambda p: p.register_post_accumulate_grad_hook(normed),
    "clamps what arrives": on_accumulators,
}


def beside_ddp(rank, world, plan, hook, is_before):
    """Gradients and weights after four steps, here and under DDP."""
    ours, theirs = chain(), chain()
    models = [ours, theirs]
    if is_before:
        for model in models:
            list(map(HOOKS[hook], model.parameters()))
    run, wrapped = begun(plan, ours, OPTIMIZERS["momentum"](ours.parameters())), DistributedDataParallel(theirs)
    if not is_before:
        for model in models:
            list(map(HOOKS[hook], model.parameters()))
    optimizers = [run._optimizer, OPTIMIZERS["momentum"](theirs.parameters())]
    apart = 0.0
    for step in range(4):
        for model, optimizer in zip([ours, wrapped], optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, rank, step)
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        apart = max([apart, *(float((one.grad - other.grad).abs().max()) for one, other in pairs)])
        for optimizer in optimizers:
            optimizer.step()
    run.close()
    return max([apart, *(float((one - other).abs().max()) for one, other in pairs)])


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_see_the_local_gradient_whenever_they_were_registered(crew, hook, is_before):
    assert max(crew(2).run(beside_ddp, mean_plan(), hook, is_before)) < 1e-15


def module_hooked(rank, world, plan):
    """What a module's backward hook, registered late, saw of gradients; and one process's of this rank alone."""
    found = []
    for is_alone in (False, True):
        model, seen = chain(), []
        run = None if is_alone else begun(plan, model)
        model[1].register_full_backward_hook(lambda module, given, got, seen=seen: seen.append(got[0].clone()))
        backward(model, rank)
        if run is not None:
            run._give_up(RuntimeError("done"))
        found.append(seen[0])
    return float((found[0] - found[1]).abs().max())


def test_backward_hooks_of_modules_see_local_gradients(crew):
    assert crew(2).run(module_hooked, mean_plan()) == [0.0, 0.0]


def late_loop(rank, world, plan):
    """A loop of one's own, a step late, whose hook is registered late: what it saw, over this rank's own gradient."""
    model, seen = chain(), []
    run = begun(plan, model)
    model[0][0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    alone = chain()
    backward(model, rank)
    backward(alone, rank)
    run._optimizer.step()
    run.close()
    return float((seen[0] - alone[0][0].weight.grad).abs().max())


def test_a_hook_in_a_loop_that_is_a_step_late_sees_the_local_gradient(crew):
    assert crew(2).run(late_loop, mean_plan("delayed_all_reduce")) == [0.0, 0.0]


# Kept gradients


def held(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


KEPT = {
    "the tensor": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "its data": lambda grad: grad.data,
    "a row of it": lambda grad: grad[:1],
    "as an array": lambda grad: grad.numpy(),
}


def kept(rank, world, plan, way, is_late):
    """By how much a gradient that is kept over three more steps has changed. is_late: the loop's steps are late."""
    model = chain()
    run = begun(plan, model)
    found = []
    for step in range(5):
        run._optimizer.zero_grad(set_to_none=True)
        backward(model, rank, step)
        if all(p.grad is not None for p in model.parameters()):
            found += [(KEPT[way](p.grad), torch.as_tensor(KEPT[way](p.grad)).clone()) for p in model.parameters()]
        run._optimizer.step()
    run.close()
    assert found
    return max(float((torch.as_tensor(one) - copy).abs().max()) for one, copy in found)


@pytest.mark.parametrize("schedule", ["simultaneous", "delayed_all_reduce"])
@pytest.mark.parametrize("way", KEPT)
def test_a_gradient_that_is_kept_stays_as_it_was(crew, way, schedule):
    assert crew(2).run(kept, mean_plan(schedule), way, schedule != "simultaneous") == [0.0, 0.0]


def watched(rank, world):
    """The same from the first step of a run that still watches, moves to its plan, and goes on."""
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run, found = armillary.parallelize(model, optimizer), []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step)
        found += [(p.grad, p.grad.clone()) for p in model.parameters()]
        optimizer.step()
    run.close()
    return max(float((one - copy).abs().max()) for one, copy in found)


def test_kept_gradients_stay_when_a_run_moves_to_its_plan(crew):
    assert crew(2).run(watched) == [0.0, 0.0]


def as_ddp(rank, world, plan, case):
    """The largest difference between what is seen here and under DDP, over some steps of a loop with a habit."""
    ours, theirs = chain(), chain()
    run, wrapped = begun(plan, ours), DistributedDataParallel(theirs)
    sides = [(ours, ours, run._optimizer), (theirs, wrapped, OPTIMIZERS["sgd"](theirs.parameters()))]
    seen = []
    for inner, model, optimizer in sides:
        seen.append([tensor.clone() for tensor in HABITS[case](inner, model, optimizer, rank)])
    run.close()
    assert len(seen[0]) == len(seen[1]) > 0
    return max(float((one - other).abs().max()) for one, other in zip(*seen, strict=True))


def zeroed_in_place(inner, model, optimizer, rank):
    """The same tensor is the gradient of every step, and is seen where it was kept."""
    kept = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        backward(model, rank, step)
        kept += [] if kept else [p.grad for p in inner.parameters()]
        yield from kept
        optimizer.step()


def detached_in_place(inner, model, optimizer, rank):
    for step in range(3):
        optimizer.zero_grad()
        backward(model, rank, step)
        for parameter in inner.parameters():
            parameter.grad.detach_()
            yield parameter.grad
        optimizer.step()


def of_a_flat_buffer(inner, model, optimizer, rank):
    """Gradients are pieces of a tensor of the script's own."""
    parameters = list(inner.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    for step in range(3):
        flat.zero_()
        backward(model, rank, step)
        yield flat
        optimizer.step()


def accumulated(inner, model, optimizer, rank):
    """Two backwards a step, each exchanged, and what was kept of the first."""
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, 2 * step)
        kept = [p.grad for p in inner.parameters()]
        backward(model, rank, 2 * step + 1)
        yield from kept
        optimizer.step()


def kept_in_a_hook(inner, model, optimizer, rank):
    """What a hook keeps is final when backward returns."""
    kept = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad)) for p in inner.parameters()]
    backward(model, rank)
    yield from kept
    for handle in handles:
        handle.remove()


def compared_with_the_last(inner, model, optimizer, rank):
    last = None
    for step in range(4):
        optimizer.zero_grad()
        backward(model, rank, step)
        now = [p.grad for p in inner.parameters()]
        if last is not None:
            yield from (one - other for one, other in zip(now, last, strict=True))
        last = now
        optimizer.step()


HABITS = {
    one.__name__: one
    for one in (
        zeroed_in_place, detached_in_place, of_a_flat_buffer, accumulated, kept_in_a_hook, compared_with_the_last,
    )
}  # fmt: skip


@pytest.mark.parametrize("case", HABITS)
def test_habits_with_gradients_give_what_ddp_gives(crew, case):
    assert max(crew(2).run(as_ddp, mean_plan(), case)) < 1e-15


def spared(rank, world, plan):
    """Whether gradients lie in buckets where nobody keeps any, and how many bytes one that is kept keeps."""
    model, quiet = chain(), []
    run = begun(plan, model)
    for step in range(3):
        run._optimizer.zero_grad()
        backward(model, rank, step)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        quiet += [p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in model.parameters()]
        run._optimizer.step()
    kept = []
    for step in range(4):
        run._optimizer.zero_grad()
        backward(model, rank, step)
        kept.append(model[0][0].bias.grad)
        run._optimizer.step()
    run.close()
    return all(quiet), [one.untyped_storage().nbytes() for one in kept[2:]], kept[0].nbytes, float(total) > 0


def test_nothing_is_copied_where_nobody_keeps_and_a_kept_gradient_holds_no_bucket(crew):
    for is_quiet, held_bytes, own_bytes, _ in crew(2).run(spared, mean_plan()):
        assert is_quiet and held_bytes == [own_bytes] * 2


# Optimizers stepped inside backward


def stepping(model):
    """By hand, as in torch's tutorial on memory."""

    @torch.no_grad()
    def own_descent(parameter):
        parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(own_descent)


def stepping_and_leaving(model):
    @torch.no_grad()
    def own_descent(parameter):
        parameter.add_(parameter.grad, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(own_descent)


def stepping_others(model):
    """Optimizers of which the run was told nothing."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def own_descent(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(own_descent)


STEPPING = [stepping, stepping_and_leaving, stepping_others]


def stepped_inside(rank, world, plan, way, is_before):
    model, said = chain(), []
    if is_before:
        way(model)
    run = begun(plan, model)
    if not is_before:
        way(model)
    said = said_by(lambda: backward(model, rank))
    run._give_up(RuntimeError("done"))
    return said


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", STEPPING)
def test_a_hook_that_steps_inside_backward_is_named_at_the_first_step(crew, way, is_before):
    for rank, said in enumerate(crew(2).run(stepped_inside, mean_plan(), way, is_before)):
        assert said.startswith(f"rank {rank}: ") and "own_descent" in said and "backward" in said


def each_in_its_hook(rank, world, plan):
    model = chain()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    run = begun(plan, model, list(optimizers.values()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), None)[1])
    said = said_by(lambda: backward(model, rank))
    run._give_up(RuntimeError("done"))
    return said


def test_a_step_of_the_runs_own_optimizer_inside_a_backward_is_called_that(crew):
    for rank, said in enumerate(crew(2).run(each_in_its_hook, mean_plan())):
        assert said.startswith(f"rank {rank}: ") and "optimizer.step() was called inside a backward" in said
        assert "after backward" in said


def in_backward(rank, world, plan, is_before):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = chain()
    if not is_before:
        run = begun(plan, model)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    said = said_by(lambda: backward(model, rank) if not is_before else begun(plan, model))
    if not is_before:
        run._give_up(RuntimeError("done"))
    return said


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_optimizers_that_torch_applies_in_backward_are_refused(crew, is_before):
    for said in crew(2).run(in_backward, mean_plan(), is_before):
        assert "inside" in said and "_apply_optimizer_in_backward" in said


# Casts and other layouts in mid-run


def moved_to(model, change):
    if change == "float":
        model.float()
    elif change == "half on one rank" and dist.get_rank() == 1:
        model.half()


def changed(rank, world, plan, change):
    model = chain()
    run = begun(plan, model)
    for step in range(3):
        if step == 2:
            moved_to(model, change)
        run._optimizer.zero_grad()
        one, other = (tensor.to(model[0][0].weight.dtype) for tensor in pair_batch(step, rank))
        if step == 2 and change == "half on one rank" and rank == 0:
            break
        said = said_by(lambda pair=(one, other): (pair_loss(model, pair).backward(), run._optimizer.step()))
    run._give_up(RuntimeError("done"))
    return said


@pytest.mark.parametrize("change", ["float", "half on one rank"])
def test_a_parameter_that_was_cast_in_mid_run_is_named_at_the_next_step(crew, change):
    said = crew(2).run(changed, mean_plan(), change)
    for rank, one in list(enumerate(said))[1 if "one rank" in change else 0 :]:
        assert one.startswith(f"rank {rank}: 3.0.bias ") and "run.close()" in one


def laid_out_anew(rank, world, plan):
    """A weight lies otherwise in memory from the second step on; how far from one process with a fused optimizer."""
    model, alone = chain(), chain()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.02, fused=True) for one in (model, alone)]
    run = begun(plan, model, optimizers[0])
    for step in range(4):
        if step == 1:
            model[0][0].weight.data = model[0][0].weight.data.t().contiguous().t()
            alone[0][0].weight.data = alone[0][0].weight.data.t().contiguous().t()
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, rank, step)
        torch.stack([pair_loss(alone, pair_batch(step, worker)) for worker in range(world)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    run.close()
    return max(float((p - q).abs().max()) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_a_parameter_may_be_laid_out_anew_in_mid_run(crew):
    assert max(crew(2).run(laid_out_anew, mean_plan())) < 1e-12


def cast_under_a_schedule(rank, world, plan):
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, pair_batch(0, 0))
    batches = [pair_batch(0, number) for number in run.run._engine.micro_batches]
    face.step(run, batches)
    model.float()
    said = said_by(lambda: face.step(run, [tuple(one.float() for one in batch) for batch in batches]))
    run.run._give_up(RuntimeError("done"))
    return said


@pytest.mark.parametrize("schedule", ["pipeline", "one_device(micro_batches=2, stages=2)"])
def test_so_it_is_under_a_schedule_that_owns_the_loop(crew, schedule):
    batches = [pair_batch(0, number) for number in range(4)]
    plan = face.plan_for(chain(), pair_loss, batches, 2, schedule=schedule)
    for rank, said in enumerate(crew(2).run(cast_under_a_schedule, plan)):
        assert said.startswith(f"rank {rank}: ") and "float32" in said and "run.close()" in said
