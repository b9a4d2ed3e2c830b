"""Whether all numbers are finite, wherever one stands that is not."""

import pytest
import torch

from armillary.codecs.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found_and_the_largest_are_none(dtype):
    most = torch.finfo(dtype).max
    for size in (0, 1, 7, 1000):
        assert all_finite(torch.full((size,), most, dtype=dtype)) and all_finite(torch.zeros(size, 1, dtype=dtype))
    for size in (1, 7, 1000):
        for place in {0, size // 2, size - 1}:
            for bad in (torch.nan, torch.inf, -torch.inf):
                values = torch.full((size,), -most, dtype=dtype)
                values[place] = bad
                assert not all_finite(values) and not all_finite(values.view(1, -1))
