"""The sparse all-reduce: what it sends follows from the rows that are touched, what arrives does not."""

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo, Rows, build_dense, touched_rows
from armillary.plans import Layout
from armillary.reference import lockstep

LAYOUT = Layout(("table", "bias", "image", "none"), ((500, 4), (), (3, 2, 2), (0, 7)), "float64")
HEADER_BYTES = 8 * (2 + 3 + len(LAYOUT.names))  # counts, a flag for each tensor that holds anything, the tail


def parcels_for(touched):
    """By rank, with values in these rows of the table; the other tensors have some everywhere."""
    found = []
    for rank, rows in enumerate(touched):
        generator = torch.Generator().manual_seed(rank)
        values = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        values[:2000].view(500, 4)[list(rows)] = torch.randn(len(rows), 4, generator=generator, dtype=torch.float64)
        values[2000:] = torch.randn(LAYOUT.numel - 2000, generator=generator, dtype=torch.float64)
        found.append(Parcel(values, torch.tensor([1.0, 0.0, 1.0, float(rank)], dtype=torch.float64), LAYOUT))
    return found


def pushed(parcels):
    exchange = build_dense("sparse_all_reduce")
    places = [RankInfo(rank, len(parcels), 1) for rank in range(len(parcels))]
    return lockstep.run([exchange.push(one, {}, place) for one, place in zip(parcels, places, strict=True)], 1)


TOUCHED = {
    "the same": [[3, 7], [3, 7], [3, 7]],
    "others": [[0, 499], [1], list(range(20))],
    "none on some": [[], [5], []],
    "none at all": [[], [], []],
    "most": [list(range(450)), [1], [2]],
}


@pytest.mark.parametrize("touched", TOUCHED.values(), ids=TOUCHED)
def test_every_rank_gets_the_sum_in_the_order_of_ranks_whatever_rows_are_touched(touched):
    wanted = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for parcel in parcels_for(touched):
        wanted += parcel.values
    for result, _ in pushed(parcels_for(touched))[0]:
        torch.testing.assert_close(result.values, wanted, rtol=0, atol=0)
        assert result.tail.tolist() == [3.0, 0.0, 3.0, 3.0]


@pytest.mark.parametrize("touched", TOUCHED.values(), ids=TOUCHED)
def test_a_rank_sends_its_rows_and_their_numbers_or_as_an_all_reduce_does(touched):
    others = len(touched) - 1
    rest = 1 + 3  # rows of the other tensors, which hold 13 numbers
    rows = [others * (HEADER_BYTES + (len(mine) + rest) * 4 + (4 * len(mine) + 13) * 8) for mine in touched]
    whole = others * HEADER_BYTES + 2 * others / len(touched) * LAYOUT.nbytes
    is_dense = max(rows) > whole
    assert is_dense == (max(map(len, touched)) > 100)
    assert pushed(parcels_for(touched))[1] == pytest.approx([whole] * len(touched) if is_dense else rows)


def test_what_is_not_a_number_arrives():
    parcels = parcels_for([[1], [2], [3]])
    parcels[1].values[2 * 4] = float("nan")
    parcels[2].values[3 * 4] = float("inf")
    for result, _ in pushed(parcels)[0]:
        assert result.values[8].isnan() and result.values[12].isinf()


NAN, INF = float("nan"), float("inf")
ROWS_OF = {
    "of either sign": ([[0.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [-0.0, 0.0]], [1, 2]),
    "that are no numbers": ([[NAN, 0.0], [0.0, 0.0], [-INF, 0.0], [0.0, INF], [NAN, -NAN]], [0, 2, 3, 4]),
    "as small as there are": ([[5e-324, 0.0], [0.0, -5e-324], [0.0, 0.0]], [0, 1]),
    "imaginary": ([[0.0, 1j], [0.0, 0.0], [-1j, 1j]], [0, 2]),
    "of one number": ([0.0, 1.0, NAN], [1, 2]),
    "of none": ([[], []], []),
    "that are none": ([], []),
}


@pytest.mark.parametrize("rows", ROWS_OF)
def test_a_row_is_touched_where_anything_in_it_is_not_zero(rows):
    values, touched = ROWS_OF[rows]
    dtype = torch.complex128 if rows == "imaginary" else torch.float64
    assert touched_rows(torch.tensor(values, dtype=dtype)).tolist() == touched


ROWS = Layout(("table", "other"), ((500, 4), (300, 2)), "float64")


def listed_for(touched, listing):
    """As rows for the ranks in `listing`, flat for the others: the same values."""
    found = []
    for rank, rows in enumerate(touched):
        generator = torch.Generator().manual_seed(rank)
        numbers, other = torch.tensor(rows, dtype=torch.int64), torch.tensor([rank])
        values = torch.randn(len(rows), 4, generator=generator, dtype=torch.float64)
        tail, flat = torch.ones(2, dtype=torch.float64), torch.zeros(ROWS.numel, dtype=torch.float64)
        one = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
        rows_of = {0: Rows(numbers, values), 1: Rows(other, one)}
        if rank not in listing:
            flat[:2000].view(500, 4)[numbers], flat[2000:].view(300, 2)[other] = values, one
        found.append(Parcel(flat, tail, ROWS, rows=rows_of if rank in listing else {}))
    return found


def whole(parcel):
    values = parcel.values.clone()
    for number, rows in parcel.rows.items():
        begin, end = ROWS.spans[number]
        values[begin:end].view(ROWS.shapes[number])[rows.numbers] = rows.values
    return values


@pytest.mark.parametrize("listing", [(0, 1, 2), (1,), ()])
@pytest.mark.parametrize("touched", TOUCHED.values(), ids=TOUCHED)
def test_what_lists_its_rows_arrives_as_what_does_not_and_lists_them_where_all_do(touched, listing):
    wanted = torch.zeros(ROWS.numel, dtype=torch.float64)
    for parcel in listed_for(touched, listing):
        wanted += whole(parcel)
    answers, sent = pushed(listed_for(touched, listing))
    for result, _ in answers:
        torch.testing.assert_close(whole(result), wanted, rtol=0, atol=0)
        assert set(result.rows) == ({0, 1} if len(listing) == 3 and len(touched[0]) < 100 else set())
    assert sent == pushed(listed_for(touched, ()))[1]


def test_a_tensor_that_one_rank_does_not_list_keeps_no_other_from_arriving_as_rows():
    touched = [[1, 3], [3], [0, 499]]
    parcels = listed_for(touched, (0, 1, 2))
    wanted = sum(whole(parcel) for parcel in parcels)
    flat = parcels[1].rows[1]
    parcels[1].values[2000:].view(300, 2)[flat.numbers] = flat.values
    parcels[1] = Parcel(parcels[1].values, parcels[1].tail, ROWS, rows={0: parcels[1].rows[0]})
    for result, _ in pushed(parcels)[0]:
        assert set(result.rows) == {0} and not result.values[:2000].any()
        torch.testing.assert_close(whole(result), wanted, rtol=0, atol=0)
