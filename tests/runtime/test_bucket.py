"""A bucket holds the gradients of its parameters side by side, and tells unused parameters from those that are zero."""

import pytest
import torch
from torch import nn

from armillary.exchanges import RankInfo, build_dense, exact_sum
from armillary.runtime.bucket import Bucket, layout_beside
from armillary.runtime.dense_unit import DenseUnit


def parameters():
    return [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))]


def total_of(parcels):
    return exact_sum(parcels, [{} for _ in parcels])[0][0]


def fill(bucket, gradients, scale):
    for index, (parameter, gradient) in enumerate(zip(bucket.parameters, gradients, strict=True)):
        parameter.grad = gradient
        if gradient is not None:
            bucket.deposit(index, scale)


def test_gradients_become_views_of_the_flat_tensor_without_a_copy():
    bucket = Bucket(parameters())
    fill(bucket, [torch.full((2, 3), 2.0), torch.full((4,), 4.0), torch.tensor(6.0)], 0.5)
    assert bucket.is_ready
    bucket.withdraw(bucket.seal(0.5))
    storage = bucket.flat.untyped_storage().data_ptr()
    for parameter, want in zip(bucket.parameters, (1.0, 2.0, 3.0), strict=True):
        assert parameter.grad.untyped_storage().data_ptr() == storage
        assert parameter.grad.shape == parameter.shape and (parameter.grad == want).all()


def test_a_state_that_no_checkpoint_could_keep_is_refused_when_a_unit_begins():
    begin = lambda layout, place, values: {"turn": torch.zeros(1)}  # noqa: E731
    exchange = build_dense("all_reduce")._replace(begin=begin)
    made = parameters()
    unit = DenseUnit("bucket 0", Bucket(made, layout_beside(made, is_guarded=True)), exchange)
    with pytest.raises(ValueError, match=r"bucket 0: the exchange's state 'turn' has shape \(1,\); want \(11,\)"):
        unit.begin_anew(RankInfo(0, 1))


def test_a_gradient_that_already_is_the_view_is_scaled_in_place():
    bucket = Bucket(parameters())
    fill(bucket, [None, torch.full((4,), 4.0), None], 1.0)
    bucket.parameters[1].grad += 2  # as autograd accumulates
    bucket.deposit(1, 0.5)
    assert bucket.parameters[1].grad.tolist() == [3.0] * 4


def test_unused_everywhere_stays_none_and_unused_somewhere_counts_as_zero():
    ranks = [Bucket(parameters()) for _ in range(2)]
    fill(ranks[0], [torch.ones(2, 3), None, None], 0.5)
    fill(ranks[1], [torch.ones(2, 3), torch.ones(4), None], 0.5)
    assert not ranks[0].is_ready and not ranks[1].is_ready
    total = total_of([bucket.seal(0.5) for bucket in ranks])
    for bucket in ranks:
        bucket.withdraw(total)
        first, second, third = (parameter.grad for parameter in bucket.parameters)
        assert (first == 1).all() and (second == 0.5).all() and third is None


def test_an_old_value_is_not_sent_for_a_parameter_that_got_no_gradient():
    bucket = Bucket(parameters())
    fill(bucket, [torch.ones(2, 3), torch.ones(4), torch.tensor(1.0)], 1.0)
    bucket.withdraw(bucket.seal(1.0))
    for parameter in bucket.parameters:
        parameter.grad = None
    bucket.reset()
    assert (bucket.seal(1.0).values == 0).all() and (bucket.seal(1.0).used == 0).all()


def test_gradients_accumulated_before_are_sent_though_this_backward_gave_none():
    bucket = Bucket(parameters())
    bucket.parameters[1].grad = torch.full((4,), 8.0)
    bucket.withdraw(bucket.seal(0.25))
    assert (bucket.parameters[1].grad == 2).all() and bucket.parameters[0].grad is None


def test_values_are_multiplied_by_their_part_of_the_mean_when_they_leave():
    ranks = [Bucket(parameters()) for _ in range(2)]
    for bucket, value in zip(ranks, (2.0, 6.0), strict=True):
        fill(bucket, [torch.full((2, 3), value), None, None], 1.0)
    parcels = [bucket.seal(1.0, mean_weight=share) for bucket, share in zip(ranks, (0.25, 0.75), strict=True)]
    ranks[0].withdraw(total_of(parcels))
    assert (ranks[0].parameters[0].grad == (1 * 2 + 3 * 6) / 4).all()


def test_between_aligned_tensors_stay_zeros():
    members = parameters()
    bucket = Bucket(members, layout_beside(members, align=4, is_guarded=True))
    fill(bucket, [torch.ones(2, 3), torch.ones(4), torch.tensor(1.0)], 1.0)
    parcel = bucket.seal(1.0)
    assert parcel.values.tolist() == [1.0] * 6 + [0.0] * 2 + [1.0] * 5 + [0.0] * 3
    bucket.withdraw(parcel.answered(torch.full((16,), 5.0), parcel.tail))
    assert bucket.values.tolist() == [5.0] * 6 + [0.0] * 2 + [5.0] * 5 + [0.0] * 3
    assert [float(p.grad.sum()) for p in members] == [30.0, 20.0, 5.0]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_told_where_somebody_looks(value):
    for is_guarded in (False, True):
        members = parameters()
        bucket = Bucket(members, layout_beside(members, is_guarded=is_guarded))
        fill(bucket, [torch.ones(2, 3), torch.full((4,), value), None], 1.0)
        assert bucket.seal(1.0).nonfinite == is_guarded


def test_weights_go_in_and_what_replaces_them_comes_out():
    members = parameters()
    bucket = Bucket(members)
    with torch.no_grad():
        parcel = bucket.weigh_in()
        bucket.weigh_out(parcel.answered(parcel.values * 3, parcel.tail))
    assert all((parameter == 3).all() for parameter in members) and members[0].grad is None


def test_a_rank_that_does_not_count_makes_no_parameter_used():
    ranks = [Bucket(parameters()) for _ in range(2)]
    fill(ranks[0], [torch.ones(2, 3), None, None], 0.5)
    fill(ranks[1], [torch.zeros(2, 3), torch.zeros(4), None], 0.5)  # its data have run out
    total = total_of([ranks[0].seal(0.5), ranks[1].seal(0.5, contributes=False)])
    for bucket in ranks:
        bucket.withdraw(total)
        assert (bucket.parameters[0].grad == 0.5).all() and bucket.parameters[1].grad is None


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.strided])
def test_sparse_and_strided_gradients_are_taken(layout):
    bucket = Bucket([nn.Parameter(torch.ones(3, 2))])
    gradient = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    given = gradient.to_sparse(1) if layout == torch.sparse_coo else torch.stack([gradient, gradient], -1)[..., 0]
    fill(bucket, [given], 2.0)
    bucket.withdraw(bucket.seal(2.0))
    assert torch.equal(bucket.parameters[0].grad, 2 * gradient)


def test_a_gradient_lies_in_memory_as_its_parameter_does():
    """Fused optimizers walk over both in the order of memory."""
    transposed = nn.Parameter(torch.ones(2, 3).t())
    image = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    spread = nn.Parameter(torch.ones(4, 2)[:, :1])  # leaves gaps: then autograd gives a plain gradient
    bucket = Bucket([transposed, image, spread])
    gradients = [
        torch.randn(2, 3).t(),
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(4, 1),
    ]
    fill(bucket, gradients, 1.0)
    bucket.withdraw(bucket.seal(1.0))
    assert transposed.grad.stride() == transposed.stride() and image.grad.stride() == image.stride()
    assert spread.grad.is_contiguous()
    assert all(torch.equal(p.grad, want) for p, want in zip(bucket.parameters, gradients, strict=True))


def test_complex_parameters_know_who_used_them():
    used, unused = (nn.Parameter(torch.ones(2, dtype=torch.complex64)) for _ in range(2))
    bucket = Bucket([used, unused])
    fill(bucket, [torch.full((2,), 2 + 4j), None], 1.0)
    bucket.withdraw(bucket.seal(1.0))
    assert torch.equal(used.grad, torch.full((2,), 2 + 4j)) and unused.grad is None
