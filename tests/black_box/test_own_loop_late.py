"""Delayed all-reduce in the user's own loop is what `run.step` makes of it, to the bit: looks, a save, clipping."""

import pytest
import torch
from plain_loop import apart, differ, state_of, train
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss

import armillary
import face

STEPS, SAVED = 5, 3
PLANS = ("delayed_all_reduce", "delayed_all_reduce(clip_norm=0.05, bucket_bytes=64)")


def plan_of(text, processes):
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(chain(), pair_loss, batches, processes, schedule=text)


def loss_of(model, batch):
    return pair_loss(model, batch)


def trained(rank, world, plan, folder, is_own, last=STEPS, path=None):
    """Weights and optimizer state of rank 0, what evaluations saw, the checkpoint."""
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    more = {} if is_own else {"loss": loss_of, "example": pair_batch(0, 0)}
    run = armillary.attach(plan, model, optimizer, **more)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen, first = [], 0
    if path is not None:
        kept = run.load(path)
        rate.load_state_dict(kept["rate"])
        first = kept["step"]
    for step in range(first, last):
        batch = pair_batch(step, rank)
        if is_own:
            loss_of(model, batch).backward()
            optimizer.step()
        else:
            run.step([batch])
        rate.step()
        seen.append(run.evaluate([pair_batch(9, 9)], lambda model, batch: {"loss": float(loss_of(model, batch))}))
        if step == SAVED - 1:
            path = run.save(folder, loop={"step": step + 1, "rate": rate.state_dict()})
    got = run.export()
    run.close()
    return got, seen, path, state_of(model)


def job(rank, world, plans, folder):
    found = []
    for number, plan in enumerate(plans):
        for is_own in (True, False):
            place = folder / f"{number}{is_own}"
            if rank == 0:
                place.mkdir()
            whole = trained(rank, world, plan, place, is_own)
            half = trained(rank, world, plan, place, is_own, path=whole[2])
            other = trained(rank, world, plan, place, not is_own, path=whole[2])
            found.append((whole, half, other))
    return found


def alike(these, those):
    if isinstance(these, torch.Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(alike(these[key], those[key]) for key in these)
    return these == those


def test_both_drivers_train_alike_to_the_bit_and_go_on_from_each_others_checkpoints(crew, tmp_path):
    answers = crew(2).run(job, [plan_of(text, 2) for text in PLANS], tmp_path)
    for place in range(0, 2 * len(PLANS), 2):
        own, by_step = (answers[0][place + turn] for turn in (0, 1))
        for seen in zip(own, by_step, strict=True):
            assert alike(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]
        for whole, half, other in (own, by_step):
            assert alike(half[0], whole[0]) and alike(other[0], whole[0]), "a checkpoint goes on, under either"
            assert half[1] == whole[1][SAVED:] and len(set(map(str, whole[1]))) == STEPS
        assert apart(answers[1][place][0][3], own[0][3]) == {}  # after close, on the other rank
    clipped, free = answers[0][2][0][3], answers[0][0][0][3]
    assert differ(clipped, free)


def test_the_own_loop_is_a_plain_loop_with_gradients_one_step_late(crew):
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    train(model, optimizer, pair_loss, [[pair_batch(step, n) for n in range(2)] for step in range(4)], is_late=True)
    for got in crew(2).run(plainly, plan_of(PLANS[0], 2)):
        assert apart(got, state_of(model)) == {}


def plainly(rank, world, plan):
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with armillary.attach(plan, model, optimizer, check_order=True):
        for step in range(4):
            optimizer.zero_grad()
            pair_loss(model, pair_batch(step, rank)).backward()
            optimizer.step()
    return state_of(model)


def misused(rank, world, plan):
    said = []
    for act in (
        lambda run, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda run, model: pair_loss(model, pair_batch(0, rank)).backward(),
        lambda run, model: run.save("anywhere"),
        lambda run, model: run.step([pair_batch(0, rank)]),
        lambda run, model: run.no_sync(),
    ):
        with pytest.raises((RuntimeError, ValueError)) as error:
            misuse(rank, plan, act)
        said.append(str(error.value))
    return said


def misuse(rank, plan, act):
    """What is done between a backward and the step."""
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with armillary.attach(plan, model, optimizer) as run:
        pair_loss(model, pair_batch(0, rank)).backward()
        optimizer.step()
        pair_loss(model, pair_batch(1, rank)).backward()
        act(run, model)
        optimizer.step()


def test_what_the_own_loop_cannot_do_is_said_with_a_correction(crew):
    for changed, twice, inside, step, sync in crew(1).run(misused, plan_of(PLANS[0], 1)):
        assert "clip by the plan: its schedule's clip_norm" in changed
        assert "a second backward before optimizer.step()" in twice and "use more workers" in twice
        assert "call it between two steps" in inside
        assert "nobody said what the loss is; give loss=loss(model, batch) and example=batch" in step
        assert "run.no_sync" in sync and "one micro-batch" in sync


def stepped_alone(rank, world, plan):
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with pytest.raises(RuntimeError) as error:
        step_alone(armillary.attach(plan, model, optimizer, loss=loss_of, example=pair_batch(0, 0)), model, optimizer)
    pair_loss(model, pair_batch(1, rank)).backward()
    optimizer.step()  # the run is over
    return str(error.value)


def step_alone(run, model, optimizer):
    with run:
        run.step([pair_batch(0, number) for number in run._engine.micro_batches])
        pair_loss(model, pair_batch(0, 0)).backward()
        optimizer.step()


def test_a_step_of_ones_own_where_run_step_takes_them_is_refused_and_not_trained_on_alone(crew):
    for text in ("delayed_all_reduce", "accumulation(micro_batches=1)"):
        for said in crew(1).run(stepped_alone, plan_of(text, 1)):
            assert f"under schedule {text.split('(')[0]} steps are taken by run.step" in said
            assert ("attach without loss and example" in said) == (text == "delayed_all_reduce")
