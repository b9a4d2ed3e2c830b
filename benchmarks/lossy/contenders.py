"""Who is compared: DDP with buckets of two sizes and with torch's hooks, and this library's plans, exact and not.

What a contender makes of a step's batch is one function. All begin with the same weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import armillary
from armillary import assumptions_of
from armillary.session.workload import Batch, Workload
from benchmarks.lossy.tasks import Task
from benchmarks.measuring.workloads import start

__all__ = [
    "EXACT",
    "OURS",
    "PEERS",
    "SETTLED_AFTER",
    "TO_THE_END",
    "WHOLE_AT_FIRST",
    "Contender",
    "built",
    "same_training",
]

RANK, START = 4, 10  # of low-rank sums: of their factors, and the steps before that go whole
EXACT = "exact"
OURS = {
    EXACT: "",
    "int8": "quantize(bits=8)",
    "threshold": "threshold(sparsity=0.99)",
    "threshold_98": "threshold(sparsity=0.98)",
    "threshold_97": "threshold(sparsity=0.97)",
    "low_rank": f"low_rank(rank={RANK}, start={START})",
    "top_k": "top_k(keep=0.01)",
}
TO_THE_END = (EXACT, "threshold", "threshold_98", "threshold_97")  # trained until nothing is gained any more, too
PEERS = ("ddp_25mb", "ddp_2mb", "ddp_fp16_25mb", "ddp_fp16_2mb", "ddp_powersgd")
# Steps of a training before it is timed: thresholds are taken anew after 1, 2, 4, ... pushes. In the first fifty two to
# seven times as much passed as in steps 100 to 600 (one seed, sparsity 0.98 and 0.99).
SETTLED_AFTER = dict.fromkeys(("threshold", "threshold_98", "threshold_97"), 100)
WHOLE_AT_FIRST = {"low_rank": EXACT, "ddp_powersgd": "ddp_25mb"}  # for START steps they take as long as that one


class Contender(NamedTuple):
    """step(batch) -> loss of this rank's batch. model: what is evaluated, on every rank the same. close: at the end."""

    step: Callable[[Batch], Tensor]
    model: nn.Module
    close: Callable[[], object]


def same_training(name: str) -> str:
    """The contender whose weights this one has after every step, but for rounding: DDP without a hook is exact."""
    if name in ("ddp_25mb", "ddp_2mb"):
        return EXACT
    return "ddp_fp16_25mb" if name == "ddp_fp16_2mb" else name


def built(name: str, task: Task, workload: Workload, seed: int, decided: Any) -> Contender:
    """
    Args:
        decided: by `auto_plan`: the exact plan of this job, with its machines and the model's profile.

    Raises:
        ValueError: no such contender.
    """
    model, optimizer = start(workload, seed)
    if name in OURS:
        plan = decided.plan
        if OURS[name]:
            wishes = task.wishes(armillary.Choice.parse(OURS[name]))
            taken = assumptions_of(optimizer)
            plan = armillary.plan(decided.profile, decided.topology, constraints=wishes, assumptions=taken)
        run = armillary.attach(plan, model, optimizer, topology=decided.topology)
        return Contender(partial(_step, workload, model, optimizer), model, run.close)
    if name not in PEERS:
        raise ValueError(f"lossy: no contender {name!r}; there are {', '.join((*OURS, *PEERS))}")
    mib = 2 if name.endswith("_2mb") else 25
    wrapped = DistributedDataParallel(model, bucket_cap_mb=mib, gradient_as_bucket_view=True, init_sync=False)
    if "fp16" in name:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif "powersgd" in name:
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=START)
        wrapped.register_comm_hook(state, powerSGD_hook)
    return Contender(partial(_step, workload, wrapped, optimizer), model, lambda: None)


def _step(workload: Workload, model: nn.Module, optimizer: Any, batch: Batch) -> Tensor:
    """The user's plain loop, once."""
    optimizer.zero_grad()
    loss = workload.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()
