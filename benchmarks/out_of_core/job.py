"""One cell: every way to train one model on one tier, by turns in one process. Prints its record.

The tutorial's hooks write and read each saved tensor where autograd asks (torch's tutorial on saved tensors), through
the same shaped lane as ours. With our read-ahead they are "swap every stage".
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary import residency
from armillary.facts.live_bytes import LiveBytes
from armillary.residency.tier import Lane, Tier
from benchmarks.measuring.record import machine
from benchmarks.out_of_core.models import MODELS

SAVED = {
    torch.ops.aten.addmm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
SMALL_BYTES = 64 << 10


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@contextmanager
def checkpointed(model: nn.Module, is_selective: bool) -> Iterator[None]:
    """Torch's own, on every block."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    more = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if is_selective else {}
    for block in model.children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    try:
        yield
    finally:
        for block in model.children():
            del block.forward


@contextmanager
def tutorials_hooks(model: nn.Module, tier: Tier) -> Iterator[None]:
    """Writes where a tensor is saved, reads where it is asked for, and waits each time."""
    kept = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}

    def carried(lane: Lane, work: Callable[..., None], flat: Tensor, offset: int) -> None:
        done = threading.Event()

        def job(buffer: Any, view: Tensor) -> None:
            work(flat, offset, buffer, view)
            done.set()

        lane.put(job)
        done.wait()

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALL_BYTES or tensor.untyped_storage()._cdata in kept:
            return tensor.detach()
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        offset = tier.take_place(len(flat))
        carried(tier.writes, tier.write, flat, offset)
        return offset, len(flat), tensor.dtype, tensor.size()

    def unpack(found: Any) -> Tensor:
        if isinstance(found, Tensor):
            return found
        offset, nbytes, dtype, size = found
        flat = torch.empty(nbytes, dtype=torch.uint8)
        carried(tier.reads, tier.read, flat, offset)
        tier.give_place(offset, nbytes)
        return flat.view(dtype).view(size)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def held(model: nn.Module, plan: residency.ResidencyPlan, folder: str, rate: float) -> residency.Held:
    return residency.hold(model, [], loss, plan=plan, tier=folder, tier_bytes_per_second=rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--rate", type=float, required=True, help="activations a forward second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tier", default=".")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = MODELS[options.model]
    model, batch = subject.make(), torch.randn(subject.small_shape if options.small else subject.shape)

    plain = residency.hold(model, [batch], loss)  # measures, keeps all
    chain = plain.plan.chain
    saved = sum(stage.saved_bytes for stage in chain.stages)
    rate = options.rate * saved / sum(stage.forward_seconds for stage in chain.stages)
    gradients = sum(stage.gradient_bytes for stage in chain.stages)
    activations = saved + sum(stage.input_bytes for stage in (*chain.stages, chain.outside))
    budget = chain.fixed_bytes + gradients + int(0.45 * activations)
    planned = residency.hold(
        model, [batch], loss, memory_bytes=budget, tier=options.tier, tier_bytes_per_second=rate
    ).plan
    alike = residency.ResidencyPlan(planned.chain, ("swap",) * len(chain.stages), 2, budget, planned.speed)
    again = residency.ResidencyPlan(planned.chain, ("recompute",) * len(chain.stages), 1, budget, planned.speed)

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "keep all": nullcontext,
        "planned": lambda: held(model, planned, options.tier, rate),
        "recompute every stage": lambda: held(model, again, options.tier, rate),
        "swap every stage": lambda: held(model, alike, options.tier, rate),
        "torch checkpoint": lambda: checkpointed(model, False),
        "torch selective checkpoint": lambda: checkpointed(model, True),
        "tutorial's hooks": lambda: _with_tier(model, options.tier, rate),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    moved = 0.0

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        loss(model, batch).backward()

    names = list(ways)
    for turn in range(options.rounds + 1):  # the first warms up, and counts bytes
        for way in (names[turn % len(names) :] + names[: turn % len(names)]) if turn else names:
            with ways[way]() as here:
                if turn == 0:
                    step()
                    for parameter in model.parameters():
                        parameter.grad = None
                    live = LiveBytes()
                    with live:
                        live.mark()
                        step()
                    peaks[way] = live.added_bytes + chain.fixed_bytes
                    continue
                began = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - began)
                if way == "planned":
                    moved = here.measured.moved_bytes
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peaks": peaks,
                "budget": budget,
                "forecast_seconds": planned.played.seconds,
                "forecast_keep_seconds": chain.compute_seconds,
                "forecast_peak": planned.played.peak_bytes,
                "forecast_moved": planned.played.moved_bytes,
                "moved": moved,
                "residencies": planned.residencies,
                "slots": planned.slots,
                "machine": machine(),
                "ladder": _ladder(planned),
            }
        )
    )


def _with_tier(model: nn.Module, folder: str, rate: float) -> AbstractContextManager[None]:
    @contextmanager
    def inside() -> Iterator[None]:
        with Tier(folder, rate) as tier, tutorials_hooks(model, tier):
            yield

    return inside()


def _ladder(plan: residency.ResidencyPlan) -> Sequence[Sequence[float]]:
    """Peaks of ten falling budgets."""
    return [[one.memory_bytes or 0, one.played.peak_bytes] for one in residency.for_budgets(plan, 10)]


if __name__ == "__main__":
    main()
