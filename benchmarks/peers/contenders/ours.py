"""Armillary: plan for this job and attach the plan; with prefetch, the loop takes its batches through the run."""

from benchmarks.peers.case import Case, Step, plain_loop
from benchmarks.peers.planning import parallelize


def train(case: Case) -> Step:
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    run = parallelize(model, optimizer, case.few(), case.loss)
    return plain_loop(case, model, optimizer, run.batches(case.batches()))


def train_ahead(case: Case) -> Step:
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    run = parallelize(model, optimizer, case.few(), case.loss, prefetch=True)
    return plain_loop(case, model, optimizer, run.batches(case.batches()))
