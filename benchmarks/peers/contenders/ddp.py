"""DistributedDataParallel, with dense and with sparse gradients of tables, and with buckets of several sizes.

`init_sync=False` leaves out a broadcast at the start only: all ranks begin alike by their seed.
"""

from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case, bucket_mib: int = 25) -> Step:
    model = DistributedDataParallel(
        case.model(), bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, init_sync=False
    )
    optimizer = case.optimizer(model.parameters())
    return plain_loop(case, model, optimizer, case.batches())


def train_sparse(case: Case) -> Step:
    model = DistributedDataParallel(case.sparse_model(), init_sync=False)
    optimizer = case.unfused_optimizer(model.parameters())
    return plain_loop(case, model, optimizer, case.batches())
