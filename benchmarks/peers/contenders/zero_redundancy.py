"""torch's ZeroRedundancyOptimizer (ZeRO stage 1) beside DistributedDataParallel."""

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case) -> Step:
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, init_sync=False)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=case.kind, parameters_as_bucket_view=True, **case.options
    )
    return plain_loop(case, model, optimizer, case.batches())
