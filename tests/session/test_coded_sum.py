"""A layer cut over ranks whose parts are summed in code: forward is the exchange's meaning, backward is exact."""

import pytest
import torch

import armillary
from armillary.codecs import build_codec
from armillary.exchanges import Parcel
from armillary.exchanges.coded import coded
from armillary.plans import Layout, Link, Topology

IN, OUT, BATCH = 12, 5, 3


def layer(world):
    """Inputs and weights of every rank's part, and what the loss multiplies the output by."""
    draw = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    parts = [(make(BATCH, IN // world).requires_grad_(), make(OUT, IN // world).requires_grad_()) for _ in range(world)]
    return parts, make(BATCH, OUT)


def row_parallel(rank, world, codec, wire):
    parts, pull = layer(world)
    inputs, weight = parts[rank]
    sums = armillary.coded_sum(codec, wire=wire, check_order=True)
    sums._transport.recording = True
    total = sums(inputs @ weight.T)
    (total.square() * pull).sum().backward()
    sent = sum(record.sent_bytes for record in sums._transport.take_records())
    sums.close()
    return total.detach(), inputs.grad, weight.grad, sent


def in_one_process(world, codec, wire):
    """What the exchange's oracle says of the parts; the gradients of an uncoded layer at that output."""
    choice, (parts, pull) = armillary.Choice.parse(codec), layer(world)
    exchange = coded(build_codec(choice.name, **choice.options), wire, feedback=False)
    layout = Layout(("part",), ((BATCH, OUT),), "float64", exchange.align, is_guarded=True)
    outputs, parcels = [inputs @ weight.T for inputs, weight in parts], []
    for one in outputs:
        values = torch.zeros(layout.numel, dtype=torch.float64)
        values[: BATCH * OUT] = one.detach().flatten()
        parcels.append(Parcel(values, torch.tensor([1.0, 0.0], dtype=torch.float64), layout))
    total = exchange.oracle(parcels, [{}] * world)[0][0].values[: BATCH * OUT].view(BATCH, OUT)
    for one in outputs:
        one.backward(2 * total * pull)
    link = Link(0.0, 1e9)
    return total, parts, exchange.sent_bytes(layout, Topology(world, 1, link, link, 1 << 30))


@pytest.mark.parametrize(
    ("world", "codec", "wire"),
    [(2, "quantize(bits=8, tile=8)", ""), (3, "quantize(bits=4, tile=8)", "scattered"), (3, "top_k(keep=0.5)", "")],
)
def test_a_row_parallel_layer_sums_in_code_and_learns_exactly(crew, world, codec, wire):
    total, parts, sent = in_one_process(world, codec, wire)
    exact = sum(inputs @ weight.T for inputs, weight in parts)
    assert not torch.allclose(total, exact.detach(), rtol=1e-6)  # the code does something
    for rank, (found, inputs, weight, counted) in enumerate(crew(world).run(row_parallel, codec, wire)):
        assert torch.equal(found, total), rank
        torch.testing.assert_close(inputs, parts[rank][0].grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weight, parts[rank][1].grad, rtol=1e-12, atol=1e-12)
        assert counted == sent[rank]


def ill(rank, world):
    sums, found = armillary.coded_sum("one_bit", check_order=True), []
    found.append(bool(sums(torch.tensor([1.0, float("inf") if rank else 2.0])).isnan().all()))
    found.append(bool(sums(torch.zeros(0)).numel() == 0))
    for part in (torch.arange(3), torch.ones(2 + rank), torch.ones(2 + 2000 * rank)):
        try:
            sums(part)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    sums._transport.give_up()
    return found


def test_what_is_not_finite_spoils_every_ranks_sum_and_what_cannot_be_summed_is_named(crew):
    for rank, (is_ill, is_empty, integers, alike, unlike) in enumerate(crew(2).run(ill)):
        assert is_ill and is_empty
        assert "coded_sum: one_bit cannot carry this part" in integers and "int64" in integers
        assert f"rank {rank} has a part of {2 + rank} numbers, all 2 ranks together have 5" in alike  # codes as long
        assert "coded sum" in unlike and "rank" in unlike


@pytest.mark.parametrize(
    ("codec", "why"),
    [("random_k(keep=0.5)", "draws by lot"), ("threshold(sparsity=0.9)", "fixed length"), ("quantise", "no codec")],
)
def test_a_codec_that_cannot_be_used_is_refused_by_name(codec, why):
    with pytest.raises(ValueError, match=why):
        armillary.coded_sum(codec)
