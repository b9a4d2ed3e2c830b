"""The mean over declared weights in 16 bits: exact to rounding, whatever the weights add up to; what it asks for."""

import pytest
import torch
from torch import nn

from armillary.session.attach import attach
from beside import plan_of, sgd

WEIGHTS = (40_000.0, 50_000.3, 7.0)  # together more than the largest float16


class Lines(nn.Module):
    """The gradient of `weight` is the batch itself; `some` is used by rank 0 only, `none` by nobody."""

    def __init__(self):
        super().__init__()
        self.weight, self.some, self.none = (nn.Parameter(torch.zeros(64)) for _ in range(3))

    def forward(self, batch, uses_some):
        value = (self.weight * batch).sum()
        return value + (self.some * batch).sum() if uses_some else value


def batch_of(rank, dtype):
    return (torch.randn(64, generator=torch.Generator().manual_seed(rank)) * 10).to(dtype)


def gradients_by_weights(rank, workers, dtype):
    model = Lines().to(dtype)
    run = attach(plan_of(model, workers, {}, mean="weights"), model, sgd(model.parameters()), check_order=True)
    run._transport.recording = True
    run.weigh(WEIGHTS[rank])
    model(batch_of(rank, dtype), rank == 0).backward()
    asked = [record.group for record in run._transport.take_records()]
    run.close()
    return model.weight.grad, model.some.grad, model.none.grad, asked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_mean_over_weights_is_that_of_one_process_rounded(crew, workers, dtype):
    gradients = [batch_of(rank, dtype).double() for rank in range(workers)]
    total, rounding = sum(WEIGHTS[:workers]), torch.finfo(dtype).eps
    want = sum(weight * gradient for weight, gradient in zip(WEIGHTS, gradients, strict=False)) / total
    want_some = WEIGHTS[0] * gradients[0] / total
    for mean, some, none, asked in crew(workers).run(gradients_by_weights, dtype):
        assert mean.dtype == dtype and none is None
        largest = sum(gradient.abs() for gradient in gradients)
        assert ((mean.double() - want).abs() <= 2 * rounding * largest).all()
        assert ((some.double() - want_some).abs() <= rounding * want_some.abs() + torch.finfo(dtype).tiny).all()
        assert asked == ["weights", "dense"]


def requests_by_step(rank, workers):
    model = Lines()
    optimizer = sgd(model.parameters())
    run = attach(plan_of(model, workers, {}), model, optimizer)
    run._transport.recording, found = True, []
    for _ in range(3):
        optimizer.zero_grad()
        model(batch_of(rank, torch.float32), True).backward()
        optimizer.step()
        found.append([(record.group, record.sent_bytes) for record in run._transport.take_records()])
    run.close()
    return found


def test_the_mean_over_workers_takes_one_request_a_bucket_with_a_flag_a_parameter(crew):
    for found in crew(2).run(requests_by_step):
        assert found == [[("dense", 2 / 2 * 4 * (3 * 64 + 3))]] * 3
