"""The contract of dense exchanges, which names none of them."""

import pytest
import torch

from armillary.exchanges.exchange import Place, build_dense, dense_exchanges
from armillary.facts.topology import Link, Topology
from armillary.reference import lockstep

CASES = [(name, options) for name, entry in dense_exchanges().items() for options in entry.examples]
LINK = Link(1e-4, 1e8)


def shapes(options):
    return [(2, 2), (4, 2), (6, 3)] if options.get("local_aggregation") else [(1, 1), (2, 1), (3, 1), (8, 1)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_program_means_what_the_oracle_says(name, options):
    exchange = build_dense(name, **options)
    for workers, per_node in shapes(options):
        generator = torch.Generator().manual_seed(workers)
        tensors = [torch.rand(13, generator=generator, dtype=torch.float64) for _ in range(workers)]
        want = exchange.oracle(tensors)
        assert torch.allclose(want[0], torch.stack(tensors).sum(0))
        programs = [exchange.push(t.clone(), Place(rank, workers, per_node)) for rank, t in enumerate(tensors)]
        got, _ = lockstep.run(programs, per_node)
        for mine, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_predicted_bytes_are_the_bytes_sent(name, options):
    exchange = build_dense(name, **options)
    for workers, per_node in shapes(options):
        tensors = [torch.ones(1000) for _ in range(workers)]
        programs = [exchange.push(t, Place(rank, workers, per_node)) for rank, t in enumerate(tensors)]
        _, sent = lockstep.run(programs, per_node)
        topology = Topology(workers // per_node, per_node, LINK, LINK, 1 << 30)
        assert sent == pytest.approx(exchange.sent_bytes(4000, topology))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_rank_makes_the_declared_number_of_requests(name, options):
    exchange = build_dense(name, **options)
    workers, per_node = shapes(options)[1]
    counted = [0] * workers

    def counting(rank):
        program, answer = exchange.push(torch.ones(5), Place(rank, workers, per_node)), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            counted[rank] += 1
            answer = yield request

    lockstep.run([counting(rank) for rank in range(workers)], per_node)
    assert counted == [exchange.requests] * workers


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match="no dense exchange 'allreduce'; there are all_reduce"):
        build_dense("allreduce")
