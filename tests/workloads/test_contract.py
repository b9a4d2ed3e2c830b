"""What every workload promises to those who train it."""

import dataclasses
import itertools

import pytest
import torch

from armillary.workloads import language_model, recommender, translation, vision

SMALL_VIT = {**vision.SMALL, "architecture": "vit", "width": 16, "depth": 1}
WORKLOADS = {
    "language_model": lambda **more: language_model.workload(**{**language_model.SMALL, **more}),
    "translation": lambda **more: translation.workload(**{**translation.SMALL, **more}),
    "recommender": lambda **more: recommender.workload(**{**recommender.SMALL, **more}),
    "vision": lambda **more: vision.workload(**{**vision.SMALL, **more}),
    "vision (vit)": lambda **more: vision.workload(**{**SMALL_VIT, **more}),
}


@pytest.fixture(params=WORKLOADS)
def small(request):
    return WORKLOADS[request.param]


def first(work, split, worker, workers, seed=0, count=3):
    return list(itertools.islice(work.batches(split, worker, workers, seed), count))


def trained(work, steps, dtype=torch.float32):
    torch.manual_seed(0)
    model = work.model().to(dtype)
    optimizer = work.optimizer(model.parameters())
    losses = []
    for seed in itertools.count():
        for batch in work.batches("train", 0, 1, seed):
            if len(losses) == steps:
                return model, losses
            optimizer.zero_grad()
            loss = work.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    raise AssertionError("unreachable")


def test_a_workload_is_frozen_and_says_what_it_counts(small):
    work = small()
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.steps = 1
    assert work.name and work.unit and work.steps > 0
    assert small(steps=7).steps == 7
    with pytest.raises(TypeError, match="no_such_option"):
        small(no_such_option=1)


def test_batches_are_the_same_each_time_and_each_seed_has_its_own(small):
    work = small()
    for split in ("train", "held_out"):
        again = first(small(), split, 1, 2)
        torch.testing.assert_close(first(work, split, 1, 2), again, rtol=0, atol=0)
    assert not same(first(work, "train", 1, 2, seed=0)[0], first(work, "train", 1, 2, seed=1)[0])


def test_workers_draw_different_batches(small):
    work = small()
    assert not same(first(work, "train", 0, 2)[0], first(work, "train", 1, 2)[0])


def test_training_batches_are_as_large_as_they_say(small):
    work = small()
    counts = {work.samples(batch) for worker in range(3) for batch in work.batches("train", worker, 3, 0)}
    assert len(counts) == 1
    per_example = {"words": getattr(work, "length", 1)}.get(work.unit, 1)
    assert counts == {work.batch_size * per_example}


def test_a_hundred_steps_lower_the_loss_of_the_same_batches(small):
    work = small()
    torch.manual_seed(0)
    fresh, (model, _) = work.model().eval(), trained(work, steps=100)
    with torch.no_grad():
        before, after = (
            sum(work.loss(each, batch).item() for batch in first(work, "train", 0, 1, count=20))
            for each in (fresh, model.eval())
        )
    assert after < 0.9 * before


def test_double_precision_works_and_gives_the_same_loss_more_finely(small):
    work = small()
    torch.manual_seed(0)
    model = work.model()
    batch = first(work, "train", 0, 1)[0]
    coarse = work.loss(model, batch)
    fine = work.loss(model.double(), batch)
    assert coarse.dtype == torch.float32 and fine.dtype == torch.float64 and fine.dim() == 0
    torch.testing.assert_close(coarse.double(), fine, rtol=1e-4, atol=1e-5)
    _, losses = trained(work, 3, torch.float64)
    assert len(losses) == 3


def test_every_parameter_gets_a_gradient(small):
    work = small()
    model = work.model()
    work.loss(model, first(work, "train", 0, 1)[0]).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_evaluation_adds_up_over_workers_and_batch_sizes(small):
    torch.manual_seed(0)
    one = small()
    model = one.model().double().eval()
    totals = []
    for work, workers in ((one, 1), (one, 3), (small(batch_size=one.batch_size + 1), 2)):
        sums: dict[str, float] = {}
        with torch.no_grad():
            for worker in range(workers):
                for batch in work.batches("held_out", worker, workers, 0):
                    for name, value in work.evaluate(model, batch).items():
                        assert type(value) is float
                        sums[name] = sums.get(name, 0) + value
        totals.append(sums)
    assert totals[1] == pytest.approx(totals[0], rel=1e-9)
    assert totals[2] == pytest.approx(totals[0], rel=1e-9)
    assert all(type(value) is float for value in one.report(totals[0]).values())


@pytest.mark.parametrize("name", ["translation", "recommender", "vision", "vision (vit)"])
def test_workers_mean_of_gradients_is_the_gradient_of_their_global_batch(name):
    """Not of the language model, whose negatives are each worker's own."""
    work, together = WORKLOADS[name](), WORKLOADS[name](batch_size=3 * WORKLOADS[name]().batch_size)
    torch.manual_seed(0)
    model = work.model().double()
    for step in range(2):
        parts = [
            torch.autograd.grad(work.loss(model, first(work, "train", worker, 3)[step]), list(model.parameters()))
            for worker in range(3)
        ]
        whole = torch.autograd.grad(work.loss(model, first(together, "train", 0, 1)[step]), list(model.parameters()))
        torch.testing.assert_close(
            [sum(grads) / 3 for grads in zip(*parts, strict=True)], list(whole), rtol=1e-8, atol=1e-12
        )


def test_one_language_model_batch_holds_the_words_of_three_workers():
    work, together = WORKLOADS["language_model"](), WORKLOADS["language_model"](batch_size=12)
    parts = [first(work, "train", worker, 3)[1] for worker in range(3)]
    whole = first(together, "train", 0, 1)[1]
    for tensor in (0, 1):
        torch.testing.assert_close(torch.cat([part[tensor] for part in parts]), whole[tensor])


def same(one, other):
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(one, other, strict=True))
