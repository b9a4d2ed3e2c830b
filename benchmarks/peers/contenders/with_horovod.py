"""Horovod's DistributedOptimizer: dense gradients, sparse ones as they are, sparse ones merged before they leave.

It makes the user's optimizer anew with its class's defaults, and forgets what that began with. Adagrad's accumulator
would begin at 0, and the loss be ten times as high after four steps; so it is put back.
"""

import horovod.torch as hvd

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case) -> Step:
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    start = optimizer.state_dict()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.load_state_dict(start)
    return plain_loop(case, model, optimizer, case.batches())


def train_sparse(case: Case) -> Step:
    model = case.sparse_model()
    optimizer = case.unfused_optimizer(model.parameters())
    start = optimizer.state_dict()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.load_state_dict(start)
    return plain_loop(case, model, optimizer, case.batches())


def train_merged(case: Case) -> Step:
    model = case.sparse_model()
    for name, parameter in model.named_parameters():
        if name in case.tables:
            parameter.register_hook(lambda gradient: gradient.coalesce())
    optimizer = case.unfused_optimizer(model.parameters())
    start = optimizer.state_dict()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.load_state_dict(start)
    return plain_loop(case, model, optimizer, case.batches())
