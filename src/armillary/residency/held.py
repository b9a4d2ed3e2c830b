"""The face of the room: measures a model's stages, plans their residencies under a budget, and holds the model to it.

held = residency.hold(model, batches, loss, memory_bytes=2 << 30, tier="/scratch")
with held:
    ...  # the loop as it was
print(held.report())
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.models.preserved_state import LiveBytes
from armillary.models.structure import mark_model, marked, stage_paths, unmark_model
from armillary.plans.group import Forecast
from armillary.plans.units import Page, Table, page_text
from armillary.residency.hooks import Hooks
from armillary.residency.lanes import play
from armillary.residency.measure_stages import Loss, measure_stages
from armillary.residency.optimizer_state import AwayState, refuse_optimizer, state_bytes
from armillary.residency.plan import ResidencyPlan, mib, ms
from armillary.residency.planner import Solution, least_bytes, search
from armillary.residency.recompute import warm_up
from armillary.residency.stage_costs import KEEP, RECOMPUTE, SWAP, StageChain, TierSpeed
from armillary.residency.swap import Waits
from armillary.residency.tier import Tier, measure_tier, open_tier

__all__ = ["Held", "for_budgets", "hold"]

DEFAULT_SLOTS = 2

MARK = "is held to a residency plan; leave that `with`, and give the schedule recompute=[...]"


def hold(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    memory_bytes: int | None = None,
    tier: str | Path | None = None,
    optimizer: Optimizer | None = None,
    stages: Sequence[str] = (),
    constraints: Mapping[str, str] | None = None,
    plan: ResidencyPlan | None = None,
    keeps_gradients: bool | None = None,
    tier_bytes_per_second: float | None = None,
) -> "Held":
    """Decides for every stage of the model to keep its activations, recompute them, or swap them to a tier.

    The model is measured stage by stage, as far as memory allows for one stage at a time, and left as it was.

    Args:
        batches: the first is taken to measure by.
        loss: loss(model, batch) -> scalar tensor.
        memory_bytes: for all tensors together: weights, gradients, optimizer state and activations; None: no limit.
        tier: a folder on a disk, or "pinned": the host's memory, for a model on CUDA; None: nothing is swapped.
        optimizer: with a tier, its state lives there too, and a step goes stage by stage; without one, it is counted.
        stages: paths of modules, or patterns such as "blocks.*"; the model's children if none are given.
        constraints: residencies by path or pattern, such as {"blocks.3": "swap"}.
        plan: carry out this one; nothing is measured.
        keeps_gradients: gradients stay between steps, as in the buckets of DDP; None: in a job of several ranks.
        tier_bytes_per_second: the most carried each way; None: as fast as the disk is.

    Raises:
        ValueError: the budget is too small, or the tier or a constraint cannot be; each names the remedy.
        TypeError: the model is compiled, or sharded by FSDP.
    """
    _refuse_unfit(model)
    if optimizer is not None and tier is not None:
        refuse_optimizer(optimizer)
    opened = None if tier is None else partial(open_tier, tier, tier_bytes_per_second, _device(model))
    with nullcontext() if opened is None else closing(opened()) as lane:  # also tells whether it can be
        if plan is None:
            asked = _Asked(memory_bytes, optimizer, stages, constraints or {}, keeps_gradients)
            plan = _planned(model, batches, loss, asked, lane)
    return Held(model, plan, opened, optimizer)


@dataclass(frozen=True)
class _Asked:
    """What `hold` was asked for; its words."""

    memory_bytes: int | None
    optimizer: Optimizer | None
    stages: Sequence[str]
    constraints: Mapping[str, str]
    keeps_gradients: bool | None


def _planned(model: nn.Module, batches: Iterable[Any], loss: Loss, asked: _Asked, tier: Tier | None) -> ResidencyPlan:
    batch = next(iter(batches), None)
    if batch is None:
        raise ValueError("residency: batches is empty; one is wanted, to measure by")
    memory_bytes, keeps_gradients = asked.memory_bytes, asked.keeps_gradients
    paths = _stages(model, asked.stages)
    fixed = _fixed(paths, asked.constraints)
    if keeps_gradients is None:
        keeps_gradients = torch.distributed.is_available() and _ranks() > 1
    measured = measure_stages(model, paths, batch, loss, _progress(len(paths)))
    chain = StageChain(
        measured.stages,
        measured.outside,
        _fixed_bytes(model, asked.optimizer if tier is None else None),
        keeps_gradients,
    )
    refused = [
        (stage, fixed[number])
        for number, stage in enumerate(chain.stages)
        if fixed.get(number, KEEP) != KEEP and (stage.only_keep or (fixed[number] == RECOMPUTE and stage.no_recompute))
    ]
    for stage, wanted in refused:
        raise ValueError(
            f"residency: constraints want {wanted} for {stage.path!r}, but {stage.only_keep or stage.no_recompute}; "
            f"it can be kept{'' if stage.only_keep else ' or swapped'}"
        )
    speed = None if tier is None else measure_tier(tier, _device(model))
    if SWAP in fixed.values() and speed is None:
        raise ValueError("residency: constraints swap a stage, but there is no tier; give tier=, a folder on a disk")
    if memory_bytes is None:  # nothing is scarce: what is not asked for is kept
        residencies = tuple(fixed.get(number, KEEP) for number in range(len(paths)))
        plan = ResidencyPlan(chain, residencies, DEFAULT_SLOTS, None, speed)
    else:
        found = search(chain, memory_bytes, speed, fixed)
        plan = ResidencyPlan(chain, found.residencies, found.slots, memory_bytes, speed, found.gap)
    away = sum(stage.moved_bytes for stage, how in zip(chain.stages, plan.residencies, strict=True) if how == SWAP)
    if tier is not None and away > (room := tier.free_bytes()):
        raise ValueError(
            f"residency: tier {tier.where} has {mib(room)} MiB free, {mib(away)} MiB are swapped; free some, name "
            "another folder, or keep stages by constraints="
        )
    return plan


def for_budgets(plan: ResidencyPlan, count: int) -> tuple[ResidencyPlan, ...]:
    """Plans of the same costs for so many budgets, evenly from keeping all down to the least that fits."""
    chain, speed = plan.chain, plan.speed
    most = play(chain, [KEEP] * len(chain.stages), 1, speed or TierSpeed(1.0, 1.0)).bound_bytes
    least = least_bytes(chain, speed, {})
    found: list[Solution] = []
    for place in range(count):
        budget = most - (most - least) * place // max(count - 1, 1)
        found.append(search(chain, budget, speed, {}, found))
        found[-1] = replace(found[-1], memory_bytes=budget)
    return tuple(ResidencyPlan(chain, one.residencies, one.slots, one.memory_bytes, speed, one.gap) for one in found)


class Held:
    """A model held to a residency plan inside `with`. Attributes: plan, a ResidencyPlan."""

    def __init__(
        self,
        model: nn.Module,
        plan: ResidencyPlan,
        opened: Callable[[], Tier] | None,
        optimizer: Optimizer | None = None,
    ) -> None:
        modules = dict(model.named_modules())
        missing = [stage.path for stage in plan.chain.stages if stage.path not in modules]
        if missing:
            raise ValueError(f"residency: the plan is of another model; this one has no {missing}")
        if SWAP in plan.residencies and opened is None:
            raise ValueError("residency: the plan swaps; give tier=, a folder on a disk")
        self.plan = plan
        self._model, self._opened, self._optimizer = model, opened, optimizer
        self._stages = {stage.path: modules[stage.path] for stage in plan.chain.stages}
        self._waits, self._state_waits = Waits(), Waits()
        self._tier: Tier | None = None
        self._hooks: Hooks | None = None
        self._state: AwayState | None = None
        self._seconds: list[float] = []
        self._peak_bytes = 0

    def __str__(self) -> str:
        return str(self.plan)

    def __enter__(self) -> "Held":
        if mark := marked(self._model):
            raise RuntimeError(f"residency: the model {mark}")
        if RECOMPUTE in self.plan.residencies:
            warm_up()
        self._tier = None if self._opened is None else self._opened()
        mark_model(self._model, MARK)
        repeated = {number for number, stage in enumerate(self.plan.chain.stages) if stage.only_keep}
        self._hooks = Hooks(
            self._stages,
            self.plan.residencies,
            self.plan.slots,
            self._tier,
            self._waits,
            self._seconds.append,
            repeated,
        )
        if self._optimizer is not None and self._tier is not None:
            self._state = AwayState(self._optimizer, tuple(self._stages.values()), self._tier, self._state_waits)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._hooks is not None
        self._hooks.remove()
        self._hooks = None
        unmark_model(self._model)
        try:
            if self._state is not None:
                self._state.remove()
        finally:
            self._state = None
            if self._tier is not None:
                self._tier.close()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the bytes of the tensors made inside, for the report: slow, so for a step or two."""
        live = LiveBytes()
        with live:
            live.mark()
            yield
        self._peak_bytes = live.added_bytes + self.plan.chain.fixed_bytes

    @property
    def measured(self) -> Forecast:
        """Of a pass inside `with`: its seconds (the median), and the bytes it moved. peak_bytes: the most that was
        there in `counted`, with what is there all the time; 0 if nothing was counted."""
        passes = max(len(self._seconds), 1)
        seconds = statistics.median(self._seconds) if self._seconds else 0.0
        return Forecast(seconds=seconds, peak_bytes=self._peak_bytes, moved_bytes=self._waits.moved_bytes / passes)

    @property
    def spared_bytes(self) -> float:
        """Of a pass: what was still there when it was asked for, and so was not carried."""
        return self._waits.spared_bytes / max(len(self._seconds), 1)

    def report(self) -> str:
        """Forecast beside what was measured, a pass."""
        return page_text(self.report_page())

    def report_page(self) -> Page:
        played, passes = self.plan.played, len(self._seconds)
        if not passes:
            return ("no pass was made inside `with`",)
        here = self.measured
        rows = [
            ("a pass, ms", ms(played.seconds), ms(here.seconds)),
            ("moved, MiB", mib(played.moved_bytes), mib(here.moved_bytes)),
            ("spared as still there, MiB", "", mib(self.spared_bytes)),
            ("waited for the tier, ms", "", ms(self._waits.seconds / passes)),
        ]
        if self._state_waits.moved_bytes:
            rows.append(("optimizer state moved, MiB", "", mib(self._state_waits.moved_bytes / passes)))
        if here.peak_bytes:
            rows.append(("peak of tensors, MiB", mib(played.peak_bytes), mib(here.peak_bytes)))
        return (Table((f"of {passes} passes", "forecast", "measured"), rows),)


def _stages(model: nn.Module, wanted: Sequence[str]) -> tuple[str, ...]:
    """Paths of the stages in the order of the model. A Sequential of composed modules stands for its parts."""
    modules = {path: module for path, module in model.named_modules() if path}
    if wanted:
        paths = [path for path in modules if any(fnmatchcase(path, one) for one in wanted)]
        nothing = [one for one in wanted if not any(fnmatchcase(path, one) for path in modules)]
        inside = [path for path in paths if any(path.startswith(f"{other}.") for other in paths)]
        if nothing:
            raise ValueError(f"residency: stages {nothing} name no module; there are {', '.join(modules)}")
        if inside and any(one in modules for one in wanted):
            raise ValueError(f"residency: stages {inside} lie inside others; name modules beside one another")
        return tuple(path for path in paths if path not in inside)
    found = list(stage_paths(model))
    paths = []
    while found:
        path = found.pop(0)
        parts = dict(modules[path].named_children())
        is_chain = isinstance(modules[path], nn.Sequential) and any(
            next(part.children(), None) is not None for part in parts.values()
        )
        if is_chain:
            found = [f"{path}.{name}" for name in parts] + found
        else:
            paths.append(path)
    return tuple(paths)


def _fixed(paths: Sequence[str], constraints: Mapping[str, str]) -> dict[int, str]:
    fixed: dict[int, str] = {}
    for pattern, residency in constraints.items():
        if residency not in (KEEP, RECOMPUTE, SWAP):
            raise ValueError(f"residency: constraints[{pattern!r}]: want keep, recompute or swap, got {residency!r}")
        numbers = [number for number, path in enumerate(paths) if fnmatchcase(path, pattern)]
        if not numbers:
            raise ValueError(f"residency: constraints[{pattern!r}] fits no stage; there are {', '.join(paths)}")
        fixed |= dict.fromkeys(numbers, residency)
    return fixed


def _fixed_bytes(model: nn.Module, optimizer: Optimizer | None) -> int:
    """Weights and buffers once each, and what the optimizer keeps, or will keep after its first step."""
    tensors: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        tensors[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    state = 0 if optimizer is None else state_bytes(optimizer)
    return sum(tensors.values()) + state


def _refuse_unfit(model: nn.Module) -> None:
    for path, module in model.named_modules():
        it = f"module {path!r}" if path else "the model"
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise TypeError(f"residency: {it} is compiled, which chooses what to save itself; hand in the plain model")
        if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            raise TypeError(
                f"residency: {it} is sharded by FSDP, whose weights come and go; use FSDP2's CPUOffloadPolicy, or hold "
                "the plain model"
            )


def _device(model: nn.Module) -> torch.device:
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _progress(count: int) -> Callable[[int, int], None]:
    """One line on a terminal, written over and over; nothing elsewhere."""
    begun = time.monotonic()

    def tell(done: int, of: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - begun > 0.5:
            end = "\n" if done == of else ""
            print(f"\rresidency: measuring stage {min(done + 1, of)} of {of}", end=end, file=sys.stderr, flush=True)

    return tell
