"""The program of one process, which all others change. Here every rank trains for itself: the time without exchange."""

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case) -> Step:
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    return plain_loop(case, model, optimizer, case.batches())


def train_sparse(case: Case) -> Step:
    model = case.sparse_model()
    optimizer = case.unfused_optimizer(model.parameters())
    return plain_loop(case, model, optimizer, case.batches())
