"""One cell: every way to train one model on one tier, by turns in one process. Prints its record."""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary import residency
from armillary.models.preserved_state import LiveBytes
from benchmarks.measuring.memory import begin_watch, peak_bytes, return_freed_memory
from benchmarks.measuring.record import machine
from benchmarks.out_of_core.models import MODELS
from benchmarks.out_of_core.ways import checkpointed, tutorials_files, tutorials_hooks

SHARE = 0.45  # of the activations


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def step(model: nn.Module, batch: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    loss(model, batch).backward()


def tensors_peak(model: nn.Module, batch: Tensor) -> int:
    """Bytes of tensors that one step adds at its fullest."""
    for parameter in model.parameters():
        parameter.grad = None
    live = LiveBytes()
    with live:
        live.mark()
        step(model, batch)
    return live.added_bytes


def kernels_peak(model: nn.Module, batch: Tensor) -> int:
    """Bytes that one step adds to the process at its fullest, as the kernel counts them."""
    for parameter in model.parameters():
        parameter.grad = None
    return_freed_memory()
    level = begin_watch()
    step(model, batch)
    return peak_bytes(level) - level.pss_bytes


def tier_rate(chain: Any, share: float) -> float:
    """Bytes a second that carry so many times the activations in the seconds of a forward."""
    saved = sum(stage.saved_bytes for stage in chain.stages)
    return share * saved / sum(stage.forward_seconds for stage in chain.stages)


def budget_bytes(chain: Any) -> int:
    gradients = sum(stage.gradient_bytes for stage in chain.stages)
    activations = sum(stage.saved_bytes + stage.input_bytes for stage in chain.stages)
    return chain.fixed_bytes + gradients + int(SHARE * (activations + chain.outside.input_bytes))


def all_alike(planned: residency.ResidencyPlan, word: str) -> residency.ResidencyPlan:
    """Every stage the same, with the best number of slots that fits."""
    plans = [
        replace(planned, residencies=(word,) * len(planned.residencies), slots=slots, gap=0.0) for slots in (1, 2, 3)
    ]
    budget = planned.memory_bytes or 0
    fits = [one for one in plans if one.played.bound_bytes <= budget]
    return min(fits or plans[:1], key=lambda one: one.played.seconds)


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
    chain = residency.hold(model, [batch], loss).plan.chain
    rate, budget = tier_rate(chain, options.rate), budget_bytes(chain)
    planned = residency.hold(
        model, [batch], loss, memory_bytes=budget, tier=options.tier, tier_bytes_per_second=rate
    ).plan

    def held(plan: residency.ResidencyPlan) -> residency.Held:
        return residency.hold(model, [], loss, plan=plan, tier=options.tier, tier_bytes_per_second=rate)

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "keep all": nullcontext,
        "planned": lambda: held(planned),
        "recompute every stage": lambda: held(all_alike(planned, "recompute")),
        "swap every stage": lambda: held(all_alike(planned, "swap")),
        "torch checkpoint": lambda: checkpointed(model),
        "torch selective checkpoint": lambda: checkpointed(model, True),
        "tutorial's hooks": lambda: tutorials_hooks(model, options.tier, rate, False),
        "tutorial's hooks with our read-ahead": lambda: tutorials_hooks(model, options.tier, rate, True),
        "tutorial's hooks through the page cache": lambda: tutorials_files(model, options.tier),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    kernel: dict[str, int] = {}
    cached = 0
    moved: list[list[float]] = []
    names = list(ways)
    for turn in range(options.rounds + 1):  # the first warms up, and counts bytes
        for way in (names[turn % len(names) :] + names[: turn % len(names)]) if turn else names:
            with ways[way]() as here:
                if turn == 0:
                    peaks[way] = tensors_peak(model, batch) + chain.fixed_bytes
                    kernel[way] = kernels_peak(model, batch) + chain.fixed_bytes
                    if "page cache" in way:
                        cached = here.most_bytes
                    continue
                began = time.perf_counter()
                step(model, batch)
                seconds[way].append(time.perf_counter() - began)
                if way == "planned":
                    moved.append([here.measured.moved_bytes, here.spared_bytes])
    found = {
        "seconds": seconds,
        "peaks": peaks,
        "kernel": kernel,
        "cached": cached,
        "budget": budget,
        "forecast_seconds": planned.played.seconds,
        "forecast_keep_seconds": chain.compute_seconds,
        "forecast_peak": planned.played.peak_bytes,
        "forecast_moved": planned.played.moved_bytes,
        "moved": moved,
        "residencies": planned.residencies,
        "slots": planned.slots,
        "gap": planned.gap,
        "machine": machine(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
