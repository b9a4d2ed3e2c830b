"""One cell: the real peak of one step under ten falling budgets, ours or a compiled one of torch. Prints its record.

Torch's `activation_memory_budget` is a share of what its compiler would save. What a compiled step holds is counted
from the allocator's own record, since no operation of it is seen; ours and its uncompiled step are counted both ways.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn

from armillary import residency
from benchmarks.measuring.record import machine
from benchmarks.out_of_core.job import loss, step, tensors_peak, tier_rate
from benchmarks.out_of_core.models import MODELS

RATE = 0.7  # of the tier, activations a forward second
BACKENDS = {"inductor": "inductor", "aot_eager": "aot_eager_decomp_partition"}  # the second makes no code


def allocators_peak(model: Any, parameters: nn.Module, batch: Tensor) -> int:
    """Bytes that one step adds at its fullest, by the allocator's record."""
    for parameter in parameters.parameters():
        parameter.grad = None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        loss(model, batch).backward()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        most = max(most, now)
    return most


def ours(model: nn.Module, batch: Tensor, folder: str, count: int) -> list[dict[str, Any]]:
    chain = residency.hold(model, [batch], loss).plan.chain
    rate = tier_rate(chain, RATE)
    first = residency.hold(model, [batch], loss, tier=folder, tier_bytes_per_second=rate).plan
    rows = []
    for plan in residency.for_budgets(first, count):
        with residency.hold(model, [], loss, plan=plan, tier=folder, tier_bytes_per_second=rate) as held:
            peak = tensors_peak(model, batch) + plan.chain.fixed_bytes
            rows.append(
                {
                    "budget": plan.memory_bytes or 0,
                    "residencies": plan.residencies,
                    "forecast": plan.played.peak_bytes,
                    "peak": peak,
                    "moved": held.measured.moved_bytes + held.spared_bytes,
                    "forecast_moved": plan.played.moved_bytes,
                }
            )
    return rows


def compiled(model: nn.Module, batch: Tensor, count: int, backend: str) -> list[dict[str, Any]]:
    import torch._functorch.config as config

    step(model, batch)
    fixed = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    rows = [
        {
            "budget": 0.0,
            "peak": allocators_peak(model, model, batch) + fixed,
            "counted": tensors_peak(model, batch) + fixed,
        }
    ]
    for place in range(count):
        share = 1 - place / count
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=share):
            made: Any = torch.compile(model, backend=backend)
            loss(made, batch).backward()
            peak = allocators_peak(made, model, batch) + fixed
        rows.append({"budget": share, "peak": peak})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--whose", choices=("ours", *BACKENDS), required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tier", default=".")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = MODELS[options.model]
    model, batch = subject.make(), torch.randn(subject.small_shape if options.small else subject.shape)
    skipped = ""
    rows: list[dict[str, Any]] = []
    if options.whose == "ours":
        rows = ours(model, batch, options.tier, options.count)
    else:
        try:
            rows = compiled(model, batch, options.count, BACKENDS[options.whose])
        except Exception as error:  # no compiler here, or one that fails: said on the page
            skipped = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    print(
        json.dumps({"rows": rows, "skipped": skipped, "backend": BACKENDS.get(options.whose, ""), "machine": machine()})
    )


if __name__ == "__main__":
    main()
