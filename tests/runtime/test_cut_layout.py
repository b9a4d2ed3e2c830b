"""What crosses a cut lies alike in every mode and in the reference, whatever layout a stage hands out."""

import pytest
import torch
from torch import nn, optim

from armillary.reference.edges import Edges
from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.random_streams import plain
from armillary.schedules.shared_stages import SharedPlacement, devices_for
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import StageContext, TrainSpec, in_a_row
from channels import in_threads
from staged_models import as_stages, same, squared_error, weights

STEPS, WORKERS, CHANNELS, SIDE, IMAGES = 3, 3, 24, 8, 5


class Noted(nn.Module):
    """Passes on; writes down how values and gradients lie here."""

    def __init__(self, place, notes):
        super().__init__()
        self.place, self.notes = place, notes

    def forward(self, value):
        self.note("value", value)
        if value.requires_grad:
            value.register_hook(lambda gradient: self.note("gradient", gradient))
        return value

    def note(self, what, tensor):
        self.notes.add((self.place, what, tensor.stride(), tensor.data_ptr() % 64))


class ChannelsLast(nn.Module):
    """Each pixel's channels side by side, as convolutions like them."""

    def forward(self, value):
        return value.contiguous(memory_format=torch.channels_last)


class Vectors(nn.Module):
    """One vector a pixel: a transposed view, as vision transformers hand it on."""

    def forward(self, value):
        return value.flatten(2).contiguous().transpose(1, 2)


def model_of(dtype, notes):
    """Three stages; between the first two the value is channels-last, between the last two transposed."""
    first = [nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Tanh(), ChannelsLast()]
    second = [nn.Conv2d(CHANNELS, CHANNELS, 2, 2), Vectors()]
    third = [nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 7), nn.Tanh()]
    stages = nn.ModuleList(
        nn.Sequential(*([Noted((j, "in"), notes)] if j else []), *layers, Noted((j, "out"), notes))
        for j, layers in enumerate((first, second, third))
    ).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stages.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return stages


def optimizer_of(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


def data(dtype):
    """[step][micro-batch] -> (images, targets)."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS, WORKERS, IMAGES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randn(STEPS, WORKERS, IMAGES, SIDE * SIDE // 4, 7, generator=generator, dtype=torch.float64)
    return [list(zip(*pair)) for pair in zip(images, targets.to(dtype))]


def reference(schedule, dtype):
    notes = set()
    stages = model_of(dtype, notes)
    run = Reference(stages, optimizer_of(stages.parameters()), schedule, squared_error)
    for batches in data(dtype):
        run.step(batches)
    return weights(stages), notes


def one_device(schedule, dtype, notes):
    stages = model_of(dtype, notes)
    run = Interpreter(as_stages(stages), optimizer_of(stages.parameters()), TrainSpec(schedule, squared_error))
    for batches in data(dtype):
        run.step(batches)
    run.settle()
    return weights(stages)


def pipeline(schedule, dtype, notes):
    def alone(rank, channel):
        stages = model_of(dtype, notes)
        own, seat = as_stages(stages)[rank], in_a_row(schedule, rank, channel)
        optimizer = optimizer_of(own.module.parameters())
        run = Interpreter(as_stages(stages), optimizer, TrainSpec(schedule, squared_error), seat)
        for batches in data(dtype):
            run.step(batches)
        run.settle()
        return weights(own.module)

    return [weight for stage in in_threads(schedule.stages, alone) for weight in stage]


def shared(schedule, dtype, notes):
    def alone(rank, channel):
        stages = model_of(dtype, notes)
        optimizer = optimizer_of(stages.parameters())
        sharing = SharedPlacement(schedule)
        spec, seat = TrainSpec(schedule, squared_error), StageContext(rank, sharing, channel)
        run = Interpreter(as_stages(stages), optimizer, spec, seat)
        for batches in data(dtype):
            run.step(batches)
        run.settle()
        return sharing.stage_of(rank), weights(stages[sharing.stage_of(rank)])

    found = dict(in_threads(devices_for(WORKERS), alone))
    return [weight for stage in sorted(found) for weight in found[stage]]


def ring(schedule, dtype, notes):
    def alone(rank, channel):
        stages = model_of(dtype, notes)
        seat = in_a_row(schedule, rank, channel)
        run = Interpreter(
            as_stages(stages), optimizer_of(stages.parameters()), TrainSpec(schedule, squared_error), seat
        )
        for batches in data(dtype):
            run.step([batches[rank]])
        run.settle()
        return weights(stages)

    first, *others = in_threads(WORKERS, alone)
    assert all(same(first, other) for other in others)
    return first


def zero_ring(schedule, dtype, notes):
    def alone(rank, channel):
        stages = model_of(dtype, notes)
        spec = TrainSpec(schedule, squared_error, lends=True)
        seat = in_a_row(schedule, rank, channel)
        run = Interpreter(as_stages(stages), optimizer_of(stages.parameters()), spec, seat)
        for batches in data(dtype):
            run.step([batches[rank]])
        run.settle()
        return {j: weights(stage) for j, stage in enumerate(stages) if j not in run.borrowed}

    found = dict(pair for answer in in_threads(WORKERS, alone) for pair in answer.items())
    return [weight for stage in sorted(found) for weight in found[stage]]


MODES = {
    "one_device": (one_device, cyclic(3)),
    "pipeline": (pipeline, cyclic_pipeline(3, 3)),
    "ring": (ring, cyclic(3)),
    "zero_ring": (zero_ring, cyclic(3)),
    "shared": (shared, cyclic(3)),
}


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_cut_hands_over_transposed_or_channels_last_is_the_references_bit_for_bit(mode, dtype):
    run, schedule = MODES[mode]
    notes = set()
    got = run(schedule, dtype, notes)
    truth, wanted = reference(schedule, dtype)
    assert same(got, truth)
    assert notes == wanted  # on every processor, whether this one's kernels heed it or not


def test_both_sides_of_a_cut_are_plain():
    _, notes = reference(cyclic(3), torch.float64)
    strides = {(place, what): stride for place, what, stride, _ in notes}
    rows = {0: (CHANNELS * SIDE**2, SIDE**2, SIDE, 1), 1: (CHANNELS * SIDE**2 // 4, CHANNELS, 1)}
    for stage, row in rows.items():
        assert strides[(stage, "out"), "value"] != row
        assert strides[(stage + 1, "in"), "value"] == row
        assert strides[(stage, "out"), "gradient"] == row


ONE_IMAGE = torch.arange(24.0).reshape(1, 4, 3, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        ONE_IMAGE.contiguous(memory_format=torch.channels_last),
        ONE_IMAGE[:, :1].contiguous(memory_format=torch.channels_last),
        torch.arange(12.0).as_strided((1, 3, 1), (5, 1, 7)),
        torch.tensor(2.0).expand(3, 4),
        torch.arange(24.0)[1:],
        torch.arange(24.0)[1],
        torch.empty(0, 3).t(),
    ],
    ids=["transposed", "channels last", "one channel", "odd strides", "expanded", "not aligned", "scalar", "empty"],
)
def test_plain_keeps_values_and_gives_the_strides_of_a_new_tensor(tensor):
    found = plain(tensor)
    assert torch.equal(found, tensor) and found.data_ptr() % 64 == 0
    assert found.stride() == torch.empty(tensor.shape).stride()
    assert plain(found).data_ptr() == found.data_ptr()  # no second copy


def test_a_crossing_passes_nests_and_gradients_on_and_leaves_unused_values_without_one():
    used, unused = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    value = {"used": used.t() * 2, "unused": unused * 2, "ids": torch.arange(3), "flag": "x"}
    there = Edges().crossed(value, None, (0, 0, 0), None)
    assert there["flag"] == "x" and torch.equal(there["ids"], value["ids"])
    assert torch.equal(there["used"], value["used"]) and there["used"].stride() == (3, 1)
    found = torch.autograd.grad((there["used"] ** 2).sum(), [used, unused], allow_unused=True)
    assert torch.equal(found[0], 8 * used.detach()) and found[1] is None
