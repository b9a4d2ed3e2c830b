"""Horovod's DistributedOptimizer: dense gradients, sparse ones as they are, sparse ones merged before they leave."""

import horovod.torch as hvd

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case) -> Step:
    model = case.model()
    optimizer = hvd.DistributedOptimizer(case.optimizer(model.parameters()), model.named_parameters())
    return plain_loop(case, model, optimizer, case.batches())


def train_sparse(case: Case) -> Step:
    model = case.sparse_model()
    optimizer = hvd.DistributedOptimizer(case.unfused_optimizer(model.parameters()), model.named_parameters())
    return plain_loop(case, model, optimizer, case.batches())


def train_merged(case: Case) -> Step:
    model = case.sparse_model()
    for name, parameter in model.named_parameters():
        if name in case.tables:
            parameter.register_hook(lambda gradient: gradient.coalesce())
    optimizer = hvd.DistributedOptimizer(case.unfused_optimizer(model.parameters()), model.named_parameters())
    return plain_loop(case, model, optimizer, case.batches())
