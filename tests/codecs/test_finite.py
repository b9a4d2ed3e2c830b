"""Whether all numbers are finite, wherever one stands that is not."""

import pytest
import torch

from armillary.codecs import all_finite


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


def test_a_complex_number_is_finite_where_both_its_parts_are():
    assert all_finite(torch.full((3,), 1 + 2j))
    for bad in (complex(torch.nan, 0), complex(0, torch.inf)):
        assert not all_finite(torch.tensor([1 + 2j, bad]))
