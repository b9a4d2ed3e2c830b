"""`split` beside plain loops: gradients, weights after training, what a step holds, and faults that must be seen."""

import copy

import pytest
import torch
import torch.nn.functional as F
from local_models import convolutions, images, loss, perceptron, rows
from plain_local_loops import local_step, windows_step
from torch import nn

import armillary
from armillary import local_losses
from armillary.models.preserved_state import LiveBytes
from armillary.models.split_loss import SplitLoss

CUTS = {"chunked": ["3"], "three": ["2", "4"], "greedy": ["1", "2", "3", "4", "5"]}


def in_loops(local):
    """A copy for the plain loops: bodies, heads, decoders."""
    parts = list(copy.deepcopy(local))
    heads = [part.head for part in parts[:-1]]
    decoders = [None if part.decoder is None else part.decoder.layers for part in parts[:-1]]
    return nn.ModuleList([part.body for part in parts]), nn.ModuleList(heads), nn.ModuleList(decoders)


def trained(local, step, weights, batches, learning=torch.optim.SGD):
    """Losses of training by `step(batch)`; random numbers begin alike."""
    torch.manual_seed(7)
    optimizer = learning(weights, 0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(step(batch))
        optimizer.step()
    return losses


def compared(local, plain_step, batches, modules):
    """Trains both; pairs of what they end with."""
    theirs = [one for module in modules for one in module.parameters()]

    def step(batch):
        value = local.loss(batch)
        value.backward()
        return value.detach()

    ours = trained(local, step, list(local.parameters()), batches)
    plain = trained(local, plain_step, theirs, batches)
    assert ours[-1] < ours[0]
    bodies, heads, decoders = modules
    pairs = list(zip(ours, plain, strict=True))
    for j, part in enumerate(local):
        pairs += zip(part.body.state_dict().values(), bodies[j].state_dict().values(), strict=True)
        for mine, other in ((part.head, heads), (part.decoder, decoders)):
            if mine is not None:
                mine = getattr(mine, "layers", mine)
                pairs += zip(mine.state_dict().values(), other[j].state_dict().values(), strict=True)
    return pairs


@pytest.mark.parametrize("cut", CUTS)
def test_a_perceptron_learns_bit_for_bit_as_in_plain_loops(cut):
    local = local_losses.split(perceptron(), loss, rows(0), at=CUTS[cut])
    assert len(local) == len(CUTS[cut]) + 1
    bodies, heads, _ = modules = in_loops(local)
    pairs = compared(local, lambda batch: local_step(bodies, heads, batch), [rows(n) for n in range(8)], modules)
    assert all(torch.equal(*pair) for pair in pairs) and len(pairs) > 8 + 12


def test_images_learn_bit_for_bit_with_a_convolution_as_head():
    local = local_losses.split(convolutions(), loss, images(0), at=["5"])
    kinds = [type(one).__name__ for one in next(iter(local)).head]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU", "AdaptiveAvgPool2d", "Flatten", "Linear", "ReLU", "Linear"]
    bodies, heads, _ = modules = in_loops(local)
    batches = [images(n, 8) for n in range(10)]
    pairs = compared(local, lambda batch: local_step(bodies, heads, batch), batches, modules)
    assert all(torch.equal(*pair) for pair in pairs)


SHARES = {2: [(5.0, 0.5)], 3: [(5.0, 0.5), (0.5, 1.0)], 4: [(5.0, 0.5), (2.75, 0.75), (0.5, 1.0)]}


@pytest.mark.parametrize("at", [["5"], ["3", "5"], ["3", "5", "7"]], ids=len)
def test_infopro_learns_bit_for_bit_and_weighs_its_losses_along_the_depth(at):
    local = local_losses.split(convolutions(), loss, images(0), at=at, objective="infopro")
    bodies, heads, decoders = modules = in_loops(local)

    def plain(shares):
        return lambda batch: local_step(bodies, heads, batch, decoders, shares)

    batches = [images(n, 8) for n in range(6)]
    pairs = compared(local, plain(SHARES[len(at) + 1]), batches, modules)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("cut", CUTS)
def test_a_loss_that_reaches_two_parts_is_that_of_explicit_windows(cut):
    local = local_losses.split(perceptron().double(), loss, doubled(rows(0)), at=CUTS[cut], reach=2)
    bodies, heads, _ = modules = in_loops(local)
    short, far = in_loops(local), in_loops(local)
    batches = [doubled(rows(n)) for n in range(6)]
    pairs = compared(local, lambda batch: windows_step(bodies, heads, batch, reach=2), batches, modules)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    local_step(*short[:2], batches[0])
    windows_step(*far[:2], batches[0], reach=2)
    apart = [(a.grad - b.grad).abs().max() for a, b in zip(short[0].parameters(), far[0].parameters(), strict=True)]
    assert apart[0] > 1e-4, "reach 2 must differ from reach 1 for the test to say anything"


def doubled(batch):
    return batch[0].double(), batch[1]


def test_one_part_is_backpropagation_bit_for_bit():
    model = convolutions()
    other = copy.deepcopy(model)
    one = local_losses.LocalLosses({"0": local_losses.HeadedPart(model)}, SplitLoss(loss, model, images(0)), model)
    for learn in (lambda batch: one.loss(batch), lambda batch: loss(other, batch)):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(one.parameters() if learn.__code__.co_freevars == ("one",) else other.parameters())
        for n in range(5):
            optimizer.zero_grad()
            learn(images(n)).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_gradients_are_summed_scaled_and_kept_as_after_any_backward():
    local = local_losses.split(perceptron(), loss, rows(0), at=["3"])
    bodies, heads, _ = in_loops(local)
    (local.loss(rows(1)) / 2).backward()
    (local.loss(rows(2)) / 2).backward()
    for number in (1, 2):
        local_step(bodies, heads, rows(number))
    ours = [one.grad for part in local for one in part.body.parameters()]
    theirs = [one.grad / 2 for one in bodies.parameters()]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    value = local.loss(rows(1))
    value.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        value.backward()
    with torch.no_grad():
        assert not local.loss(rows(1)).requires_grad
        torch.testing.assert_close(local.loss(rows(1)), value.detach())


def test_the_plain_model_has_the_weights_and_no_heads():
    model = perceptron()
    names = list(model.state_dict())
    local = local_losses.split(model, loss, rows(0), at=["3"])
    assert local.plain() is model and list(model.state_dict()) == names
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    local.loss(rows(1)).backward()
    optimizer.step()
    assert not any(torch.equal(before[name], now) for name, now in model.state_dict().items())
    torch.testing.assert_close(local(rows(1)[0]), model(rows(1)[0]), rtol=0, atol=0)
    twin = copy.deepcopy(local)
    assert twin.plain()[0][0].weight is next(iter(twin)).body[0].weight is not model[0][0].weight


def test_a_step_holds_the_activations_of_one_part_at_a_time():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    batch = torch.randn(16, 8, 32, 32), torch.randint(4, (16,))
    local = local_losses.split(model, loss, batch, at=["4"])
    most = []
    for learn in (lambda: loss(model, batch), lambda: local.loss(batch)):
        live = LiveBytes()
        with live:
            live.mark()
            learn().backward()
        most.append(live.added_bytes)
    assert most[1] < 0.65 * most[0]


def test_named_parts_of_a_model_that_is_no_sequential():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.above(self.below(x))

    model = Own()
    local = local_losses.split(model, loss, rows(0), parts=[model.below, model.above], head=nn.Linear(16, 4))
    local.loss(rows(1)).backward()
    assert all(weight.grad is not None for weight in local.parameters())


def two_ranks(rank, world):
    local = local_losses.split(perceptron().double(), loss, doubled(rows(0)), at=["3"])
    optimizer = torch.optim.SGD(local.parameters(), 0.1, momentum=0.9)
    with armillary.parallelize(local, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            local.loss(doubled(rows(10 * step + rank))).backward()
            optimizer.step()
    return [weight.detach().clone() for weight in local.parameters()]


def test_two_ranks_under_parallelize_learn_as_one_process(crew):
    found = crew(2).run(two_ranks)
    local = local_losses.split(perceptron().double(), loss, doubled(rows(0)), at=["3"])
    optimizer = torch.optim.SGD(local.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (local.loss(doubled(rows(10 * step + rank))) / 2).backward()
        optimizer.step()
    for rank in range(2):
        for mine, true in zip(found[rank], local.parameters(), strict=True):
            torch.testing.assert_close(mine, true.detach(), rtol=0, atol=1e-12)


class Spoils(nn.Module):
    """NaN, once it is told to be."""

    factor = 1.0

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("reach", [1, 2])
def test_fault_a_missing_detach_is_seen_by_a_later_nan(reach):
    """A loss that is NaN leaves the gradients finite that it does not reach."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4), Spoils())
    local = local_losses.split(model, loss, rows(0), at=["1", "2"], reach=reach)
    model[3].factor = float("nan")
    local.loss(rows(0)).backward()
    finite = [all(weight.grad.isfinite().all() for weight in part.body.parameters()) for part in local]
    assert finite == [True, reach == 1, False]
    bodies, heads, _ = in_loops(local)
    local_step(bodies, heads, rows(0), is_cut=False)  # planted: nothing is detached
    assert not any(weight.grad.isfinite().all() for weight in bodies.parameters())


def test_fault_a_head_that_is_not_stepped_is_seen():
    local = local_losses.split(perceptron(), loss, rows(0), at=["3"])
    bodies, heads, _ = modules = in_loops(local)
    trained(
        local, lambda batch: local_step(bodies, heads, batch), list(bodies.parameters()), [rows(n) for n in range(4)]
    )
    trained(local, lambda batch: local.loss(batch).backward(), list(local.parameters()), [rows(n) for n in range(4)])
    pairs = zip(local[0].body.parameters(), modules[0][0].parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


def test_fault_weights_that_are_not_interpolated_are_seen():
    local = local_losses.split(convolutions(), loss, images(0), at=["3", "5", "7"], objective="infopro")
    bodies, heads, decoders = modules = in_loops(local)
    flat = [SHARES[4][0]] * 3
    pairs = compared(
        local, lambda batch: local_step(bodies, heads, batch, decoders, flat), [images(0, 8), images(1, 8)] * 4, modules
    )
    assert not all(torch.equal(*pair) for pair in pairs)


def named(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def test_a_batch_may_be_any_nest():
    x, y = rows(0)
    local = local_losses.split(perceptron(), named, {"x": x, "y": y}, at=["3"])
    assert local.loss({"x": x, "y": y}).isfinite()


@pytest.mark.parametrize("reach", [1, 2])
def test_heads_that_share_weights_learn_from_each_loss(reach):
    """One head for two parts, which is the last part of the model, too."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    batch = torch.randn(8, 4), torch.arange(8) % 3
    head = model[2]

    def task(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    local = local_losses.split(model, task, batch, at=["1", "2"], head=[head, head], reach=reach)
    local.loss(batch).backward()
    first = model[0](batch[0])
    second = model[1](first.detach())
    outputs = [head(first), head(second), head(second.detach())]
    losses = sum(F.cross_entropy(output, batch[1]) for output in outputs)
    assert torch.allclose(head.weight.grad, torch.autograd.grad(losses, head.weight)[0], atol=1e-6)
