"""Coded exchanges as they run, N workers in one process, held bit for bit to what their oracles say; and no gradient is
lost."""

from dataclasses import replace

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo
from armillary.plans import Layout, Link, Topology
from armillary.reference import lockstep
from in_lockstep import OPTIMIZERS, built, trained

CODED = (
    "quantize(bits=8, tile=8)", "quantize(bits=2, tile=8)", "one_bit(tile=8)", "lower_precision(dtype=bfloat16)",
    "hadamard(quantize(bits=4, tile=64))", "top_k(keep=0.25)", "random_k(keep=0.25)",
)  # fmt: skip
OTHERS = (
    "low_rank(rank=1, start=2)", "low_rank(rank=1, start=0, alternate=True)",  # of the net's (6, 6) and (6, 5)
    "threshold(sparsity=0.75, lifespan=3, small=7)",  # two of the net's tensors are small
)  # fmt: skip


@pytest.mark.parametrize("text", [*CODED, *OTHERS])
def test_workers_train_bit_for_bit_as_the_oracle_says(text):
    """Ranks, dtypes, optimizers; a step that overflows on one rank; parameters that few or none use."""
    for count in (1, 2, 3, 4, 8) if text in (*CODED[:2], *OTHERS) else (1, 2, 3):
        assert trained(text, count, torch.float64) == [], count
    for dtype in (torch.float32, torch.bfloat16):
        assert trained(text, 3, dtype) == [], dtype
    for optimizer in OPTIMIZERS if text in (CODED[0], *OTHERS) else ():  # which know nothing of codecs
        assert trained(text, 3, torch.float32, optimizer) == [], optimizer
    for wire, counts in (
        (("gathered", (4,)), ("scattered", (2, 4))) if text in CODED else ()
    ):  # two workers gather anyway
        other = text.removesuffix(")") + f", wire={wire})"
        assert all(trained(other, count, torch.float32) == [] for count in counts), wire


@pytest.mark.parametrize("text", [*CODED, *OTHERS])
def test_means_by_weight_and_scaled_losses_change_no_bit(text):
    """What is kept is in units of gradients: a loss scale that doubles and halves leaves no trace."""
    assert trained(text, 3, torch.float64, weights=[1.0, 0.0, 3.0]) == []
    assert trained(text, 3, torch.float32, scales=(1024.0, 2048.0, 512.0)) == []


def parcels_for(layout, workers, step):
    generator = torch.Generator().manual_seed(100 * step + workers)
    found = []
    for rank in range(workers):
        values = torch.zeros(layout.numel, dtype=torch.float64)
        for begin, end in layout.spans:
            values[begin:end] = torch.randn(end - begin, generator=generator, dtype=torch.float64) * 10.0**rank
        used = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
        found.append(Parcel(values, used, layout))
    return found


@pytest.mark.parametrize("wire", ["gathered", "scattered"])
@pytest.mark.parametrize("text", CODED)
def test_over_all_steps_nothing_is_lost(text, wire):
    exchange, workers = built(text.removesuffix(")") + f", wire={wire})"), 3
    layout = Layout(("a", "b"), ((9, 5), (7,)), "float64", exchange.align, True)
    states = [exchange.begin(layout, RankInfo(rank, workers), torch.zeros(layout.numel)) for rank in range(workers)]
    states = [{key: value.double() for key, value in state.items()} for state in states]
    went_in = came_out = torch.zeros(layout.numel, dtype=torch.float64)
    for step in range(30):
        parcels = parcels_for(layout, workers, step)
        places = [RankInfo(rank, workers) for rank in range(workers)]
        moved, _ = lockstep.run([exchange.push(*one) for one in zip(parcels, states, places)])
        states = [state for _, state in moved]
        went_in = went_in + sum(parcel.values for parcel in parcels)
        for begin, end in layout.spans:
            came_out = came_out.clone()
            came_out[begin:end] += moved[0][0].values[begin:end]
    left = sum(state["residual"] for state in states)
    assert float((went_in - came_out - left).abs().max()) < 1e-10 * float(went_in.abs().max())
    assert float(left.abs().max()) > 0, "the code must lose something, or this test shows nothing"


def requests_of(exchange, layout, workers):
    """Of one push of rank 0; what all bytes sent are, and the exchange's forecast of them."""
    seen, generator = [], torch.Generator().manual_seed(1)

    def watched(program, kept):
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            kept.append(type(request).__name__)
            answer = yield request

    places = [RankInfo(rank, workers) for rank in range(workers)]
    values = [torch.randn(layout.numel, generator=generator, dtype=torch.float64) for _ in places]
    parcels = [Parcel(one, torch.ones(layout.tail, dtype=torch.float64), layout) for one in values]
    states = [exchange.begin(layout, place, torch.zeros_like(values[0])) for place in places]
    pushes = [exchange.push(*one) for one in zip(parcels, states, places)]
    moved, sent = lockstep.run([watched(push, seen if not rank else []) for rank, push in enumerate(pushes)])
    told, _ = exchange.oracle(parcels, states)
    assert all(torch.equal(got.values, want.values) for (got, _), want in zip(moved, told))
    link = Link(1e-4, 1e8)
    topology = Topology(workers, 1, link, link, 1 << 33)
    assert sent == exchange.sent_bytes(layout, topology) and len(exchange.legs(layout, topology)) == len(seen)
    return seen


@pytest.mark.parametrize("wire", ["", ", wire=scattered"])
def test_a_bucket_of_less_than_a_tile_a_worker_is_gathered(wire):
    exchange = built(f"quantize(bits=8, tile=8{wire})")
    for workers in (3, 4):
        enough, few = (Layout(("w",), ((8 * tiles,),), "float64", 8, True) for tiles in (workers, workers - 1))
        assert requests_of(exchange, enough, workers) == ["AllToAll", "AllToAll"]
        assert requests_of(exchange, few, workers) == ["AllGather"]
        assert "sums coded again" in exchange.mechanisms(enough, workers)
        assert "sums coded again" not in exchange.mechanisms(few, workers)
    assert ("less than a tile a worker are gathered" in exchange.says) is bool(wire)


def test_without_feedback_what_is_left_out_is_lost_and_the_exchange_says_so():
    exchange = built("one_bit(tile=8, feedback=False)")
    assert exchange.says == "what is left out is lost"
    assert trained("one_bit(tile=8, feedback=False)", 3, torch.float64) == []
    assert built("top_k(keep=0.3, feedback=False)").says.endswith("0.333 of all; what is left out is lost")


BAD = {
    "quantize(bits=8, wire=thin)": "wire 'thin' is none of gathered, scattered",
    "quantize(bits=3)": "knows 8, 4 and 2 bits, got 3",
    "top_k(keep=2)": "above 0 and at most 1, got 2",
    "quantize(bit=8)": "quantize refuses options",
    "quantize(feedback=no)": "want feedback True or False, got 'no'",
    "threshold(sparsity=1)": "sparsity of 0 or more and below 1, got 1",
    "threshold(sparsity=-0.1)": "sparsity of 0 or more and below 1, got -0.1",
    "threshold(lifespan=0)": "lifespan as a whole number of 1 or more, got 0",
    "threshold(small=-1)": "small as a whole number of 0 or more, got -1",
    "low_rank(rank=0)": "rank as a whole number of 1 or more, got 0",
    "low_rank(start=-1)": "start as a whole number of 0 or more, got -1",
    "low_rank(alternate=false)": "wants alternate=True or alternate=False, got 'false'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_options_are_refused(text):
    with pytest.raises(ValueError, match=BAD[text]):
        built(text)


def test_what_a_codec_cannot_shorten_or_code_is_refused_by_name():
    half = Layout(("w",), ((64,),), "bfloat16", 1, True)
    assert "as long as the numbers, which are bfloat16 already" in built("lower_precision").refuses(half)
    assert built("lower_precision").refuses(replace(half, dtype="float32")) == ""
    assert "w holds int64" in built("quantize").refuses(replace(half, dtype="int64"))
    for text in ("quantize", "threshold", "low_rank"):
        assert "w holds complex64" in built(text).refuses(replace(half, dtype="complex64"))


@pytest.mark.parametrize("text", ["random_k(keep=0.01)", "random_k(keep=0.01, wire=scattered)"])
def test_numbers_of_16_bits_lose_nothing_while_they_wait_for_hundreds_of_pushes(text):
    """The gradient is constant: its residual grows to hundreds of times as much, where 256 + 1 is 256 in bfloat16."""
    exchange, layout = built(text), Layout(("w",), ((1000,),), "bfloat16", built(text).align, True)
    values = torch.ones(layout.numel, dtype=torch.bfloat16)
    states = [exchange.begin(layout, RankInfo(rank, 2), values) for rank in range(2)]
    came_out, pushes = torch.zeros(layout.numel, dtype=torch.float64), 300
    for _ in range(pushes):
        parcel = Parcel(values, torch.tensor([1.0, 0.0], dtype=torch.float64), layout)
        moved, _ = lockstep.run([exchange.push(parcel, states[rank], RankInfo(rank, 2)) for rank in range(2)])
        came_out += moved[0][0].values.double()
        states = [state for _, state in moved]
    left = sum(state["residual"].double() for state in states)
    assert float((came_out + left - 2 * pushes).abs().max()) < 1e-3 * pushes
    assert float(left.max()) > 2 * 256
