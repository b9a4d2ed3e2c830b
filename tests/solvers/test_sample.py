"""`sample`: the samples of the loop that goes pixel by pixel, from the same noise."""

import pytest
import torch
from plain_loops import METHODS, NAMES, categorical, sampled

from armillary import solvers

F64 = torch.float64


def net_of(unknowns=24, levels=4, seed=0):
    torch.manual_seed(seed)
    net = solvers.Made(unknowns, levels, width=64).to(F64)
    with torch.no_grad():
        for one in net.parameters():
            one.mul_(3)  # pixels hang on one another
    return net


def noise_of(samples, unknowns, seed, *more):
    return torch.rand(samples, unknowns, *more, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(("method", "options"), [*METHODS, ("incremental", {})], ids=[*NAMES, "incremental"])
def test_samples_are_those_of_the_loop(method, options):
    net, said = net_of(), []
    images = solvers.sample(net, (10, 24), levels=4, seed=3, method=method, report=said.append, **options)
    truth = sampled(net, noise_of(10, 24, 3), categorical)
    assert images.dtype == torch.long and len(truth.unique()) == 4
    assert torch.equal(images, truth), said
    assert said[0].close_calls == 0 and "finished" not in said[0].said


def test_the_seed_decides():
    net = net_of()
    one, again, other = (solvers.sample(net, (4, 24), levels=4, seed=seed, method="jacobi") for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_single_precision_and_the_seed_give_nearly_always_the_same_samples():
    net = net_of()
    images = solvers.sample(net, (50, 24), levels=4, seed=3, method="jacobi")
    assert (solvers.sample(net.float(), (50, 24), levels=4, seed=3, method="jacobi") == images).float().mean() > 0.98


def test_a_part_of_made_is_that_part_of_the_whole():
    net = net_of()
    pixels = torch.randint(0, 4, (5, 24), generator=torch.Generator().manual_seed(0))
    for at in (slice(0, 5), slice(7, 8), slice(10, 24), slice(1, 24, 4)):
        assert torch.allclose(net.outputs_at(pixels, at), net(pixels)[:, at], rtol=0, atol=1e-12)


def test_draws_of_the_callers_own():
    """A mixture of two: which one by the first number, where by the second."""
    net = net_of(levels=5)

    def draw(outputs, noise):
        mean = torch.where(noise[..., 0] < outputs[..., 0].sigmoid(), outputs[..., 1], outputs[..., 2])
        wide = outputs[..., 3].exp().clamp(max=2)
        return (mean + wide * torch.logit(noise[..., 1], 1e-6)).clamp(0, 4).round().long()

    images = solvers.sample(net, (6, 24), draw=draw, noise_per_unknown=2, seed=5, method="jacobi")
    assert torch.equal(images, sampled(net, noise_of(6, 24, 5, 2), draw)) and len(images.unique()) > 2


def test_real_valued_draws():
    torch.manual_seed(0)
    matrix = torch.randn(12, 12, dtype=F64).triu(1) / 3

    def net(x):
        return (x @ matrix)[..., None]

    def draw(outputs, noise):
        return torch.tanh(outputs[..., 0] + torch.logit(noise))

    images = solvers.sample(net, (4, 12), draw=draw, seed=1, method="jacobi", dtype=F64)
    noise, truth = noise_of(4, 12, 1), torch.zeros(4, 12, dtype=F64)
    for t in range(12):
        truth[:, t] = draw(net(truth)[:, t], noise[:, t])
    assert torch.allclose(images, truth, rtol=0, atol=1e-12)


def test_draws_near_a_boundary_are_counted():
    noise = noise_of(2, 3, 0)
    chance = noise.clone()
    chance[0, 1] += 5e-7  # close
    chance[1, 2] += 1e-4  # not close
    chance[0, 0], chance[0, 2], chance[1, 0], chance[1, 1] = 0.999, 0.999, 0.999, 0.999

    def net(x):
        return torch.stack([chance.log()[: len(x)], (1 - chance).log()[: len(x)]], -1).expand(len(x), 3, 2)

    said = []

    def whole(x):  # the check of causality asks for another number of samples
        return net(x) if len(x) == 2 else torch.zeros(len(x), 3, 2, dtype=F64)

    solvers.sample(whole, (2, 3), levels=2, seed=0, method="jacobi", report=said.append)
    assert said[0].close_calls == 1


@pytest.mark.parametrize("unknowns", [0, 1])
@pytest.mark.parametrize("method", ["in_order", "jacobi", "auto"])
def test_hardly_any_unknown(unknowns, method):
    def net(x):
        return torch.zeros(*x.shape, 3, dtype=F64)

    assert solvers.sample(net, (5, unknowns), levels=3, method=method).shape == (5, unknowns)


def test_it_draws_from_a_generator_of_its_own():
    before = torch.get_rng_state()
    solvers.sample(lambda x: torch.zeros(*x.shape, 3), (5, 4), levels=3, method="jacobi")
    assert torch.equal(torch.get_rng_state(), before)
