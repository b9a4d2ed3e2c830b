"""Armillary on the language model with its words numbered otherwise than by frequency: what the order of ids costs."""

import torch

from benchmarks.peers.case import Batch, Case, Step, plain_loop
from benchmarks.peers.planning import parallelize

FACTOR = 247213  # prime, and no divisor of any vocabulary here: id * FACTOR mod V is a permutation


def train(case: Case) -> Step:
    model = case.model()
    rows = {len(model.get_parameter(name)) for name in case.tables}
    assert len(rows) == 1, f"one numbering for tables of {rows} rows"
    numbers = torch.arange(min(rows)) * FACTOR % min(rows)
    for name in case.tables:
        table = model.get_parameter(name)
        table.data = torch.empty_like(table).index_copy_(0, numbers, table.detach())

    def scrambled(batch: Batch) -> Batch:
        return tuple(numbers[ids] for ids in batch)

    optimizer = case.optimizer(model.parameters())
    run = parallelize(model, optimizer, map(scrambled, case.few()), case.loss)
    return plain_loop(case, model, optimizer, run.batches(map(scrambled, case.batches())))
