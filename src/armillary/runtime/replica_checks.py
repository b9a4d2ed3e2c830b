"""Whether what every rank should hold alike still is alike: checksums of parameters, then values where these differ.

After an exchange every rank holds the same gradient, takes the same step and so has the same weights. Nothing else
would show that this has ended. So it is looked at now and then in a loop, and whenever weights leave a run. What a plan
lets differ is not compared.

Buffers (running statistics, counters) are rank 0's on all ranks once a step, as in DDP, or those of the first rank that
still has data. They travel as bytes that one rank fills, so that whole numbers and the sign of zero arrive as they are.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.plans.requests import summed
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.loop_agreement import Option, unlike_options
from armillary.transport.agreement import checksum
from armillary.transport.transport import Transport

__all__ = [
    "LABEL",
    "BufferPlace",
    "Buffers",
    "DriftReport",
    "ReplicatedState",
    "alike",
    "buffers_of",
    "compare",
    "differing",
    "differing_buffers",
    "refuse_drift",
    "warn",
    "write_buffer",
]

LABEL = "buffers"


class BufferPlace(NamedTuple):
    """Where a buffer stands, since a module may put another tensor there."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size

    @property
    def there(self) -> Tensor:
        found = self.module._buffers[self.key]
        assert found is not None, self.name
        return found

    @property
    def is_persistent(self) -> bool:
        """Whether it is part of the model's state_dict."""
        return self.key not in self.module._non_persistent_buffers_set


class Buffers:
    """Args:
    is_wanted: False leaves every rank its own.
    """

    def __init__(self, model: nn.Module, transport: Transport, is_wanted: bool = True) -> None:
        self.transport = transport
        is_on = is_wanted and transport.place.workers > 1
        self.places = buffers_of(model) if is_on else []

    @torch.no_grad()
    def spread(self, root: int) -> None:
        """Collective, where there are any; else nothing is done. root: the rank whose they are.

        Raises:
            RuntimeError: a buffer has changed its shape.
        """
        by_device = defaultdict[torch.device, list[tuple[BufferPlace, Tensor]]](list)
        for place in self.places:
            by_device[(buffer := place.there).device].append((place, buffer))
            self._refuse_other_shape(place, buffer)
        is_root = self.transport.place.rank == root
        for pairs in by_device.values():
            mine = [buffer.contiguous().view(-1).view(torch.uint8) for _, buffer in pairs]
            flat = torch.cat(mine) if is_root else mine[0].new_zeros(sum(map(len, mine)))
            theirs = self.transport.complete(summed(flat), LABEL)
            if not is_root:
                for (place, buffer), part in zip(pairs, theirs.split(list(map(len, mine))), strict=True):
                    write_buffer(place, part.clone().view(buffer.dtype).view(buffer.shape))

    def _refuse_other_shape(self, place: BufferPlace, buffer: Tensor) -> None:
        if buffer.shape != place.shape:
            raise RuntimeError(
                f"rank {self.transport.place.rank}: buffer {place.name!r} is {tuple(buffer.shape)} and was "
                f"{tuple(place.shape)} at attach, so ranks cannot share it; say "
                "broadcast_buffers=False to parallelize or attach"
            )


def buffers_of(model: nn.Module) -> list[BufferPlace]:
    """Every buffer once, in the model's order; none that is empty."""
    found: dict[Tensor, BufferPlace] = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.numel():
                found.setdefault(buffer, BufferPlace(f"{path}.{key}" if path else key, module, key, buffer.shape))
    return list(found.values())


def write_buffer(place: BufferPlace, value: Tensor) -> None:
    """Running statistics are no part of a training step's graph, so one that still waits for its backward may go on."""
    buffer = place.there
    if getattr(place.module, "track_running_stats", False):
        buffer.data.copy_(value)
    elif not torch.equal(buffer, value):
        buffer.copy_(value)


EVERY = 1000
EARLY = (3, 10, 100)  # most faults are there from the beginning; the first two steps of a loop are watched
ROUNDING = 1e-5  # of a tensor's norm: what unlike processors make of the same steps
BLOCK = 1 << 20  # numbers that are compared at once


@dataclass(frozen=True, eq=False)
class ReplicatedState:
    """What this rank holds, of which every other that holds it has the same. parameters: by name. options: of the
    optimizer that steps them."""

    parameters: Mapping[str, Tensor]
    options: Sequence[Option] = ()


class DriftReport(NamedTuple):
    """The same on every rank; empty where there is nothing to say."""

    error: str = ""
    warning: str = ""


class _Told(NamedTuple):
    """Of one rank: by name a checksum and the shape, and options."""

    sums: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    options: Sequence[Option]


class _Apart(NamedTuple):
    """A rank that holds a parameter otherwise than another, by so much of its norm."""

    name: str
    rank: int
    other: int
    share: float


def alike(units: Sequence[object]) -> Iterator[tuple[str, Any]]:
    """The dense parameters that all ranks should hold alike, by name."""
    for unit in units:
        if isinstance(unit, DenseUnit) and unit.exchange.keeps_replicas_alike:
            named = zip(unit.bucket.layout.names, unit.parameters, strict=True)
            yield from ((name, parameter) for name, parameter in named if name not in unit.rewritten)


def is_looked_at(step: int) -> bool:
    """Whether parameters are compared after that step of a loop."""
    return step % EVERY == 0 or step in EARLY


@torch.no_grad()  # a watch over the loop takes it for no read of the loop's
def compare(held: ReplicatedState, transport: Transport, when: str) -> DriftReport:
    """Collective. Whether ranks that hold the same parameters hold them alike, bit for bit; else by how much not.

    Args:
        when: as in "after step 3"; begins what is said.
    """
    if transport.place.workers == 1:
        return DriftReport()
    mine = _Told(
        {name: checksum(value) for name, value in held.parameters.items()},
        {name: tuple(value.shape) for name, value in held.parameters.items()},
        held.options,
    )
    everyones: list[_Told] = transport.share(mine)
    found = _far_apart(held, transport, everyones)
    worst = max(found, key=lambda one: one.share, default=None)
    options = _unlike_options(everyones)
    if worst is not None and worst.share > ROUNDING:
        names = len({one.name for one in found if one.share > ROUNDING})
        more = f" (and {names - 1} more)" if names > 1 else ""
        said = f"{when} the ranks no longer hold {worst.name}{more} alike: {_by(worst)}{options}"
        return DriftReport(error=f"{said}. {ADVICE}")
    if options:
        return DriftReport(error=f"{when} the ranks' optimizers differ{options}. {ADVICE}")
    if worst is not None and worst.share > 0:
        said = f"{when} the ranks no longer hold {worst.name} alike to the last bit: {_by(worst)}"
        return DriftReport(warning=f"{said}; unlike processors round otherwise, and this grows slowly")
    return DriftReport()


ADVICE = (
    "Since they last were alike, something was changed on some ranks only: parameters, gradients between backward and "
    "step, or the optimizer; begin again from a checkpoint that was saved before"
)


def _by(worst: _Apart) -> str:
    return f"rank {worst.rank} is {worst.share:.1e} of its norm away from rank {worst.other}"


def _unlike_options(everyones: Sequence[_Told]) -> str:
    """Of ranks that hold the same parameters; in words that are added to others."""
    alike: dict[tuple[str, ...], dict[int, Sequence[Option]]] = {}
    for rank, theirs in enumerate(everyones):
        alike.setdefault(tuple(theirs.sums), {})[rank] = theirs.options
    for those in alike.values():
        if said := unlike_options(those):
            return f", in {said}"
    return ""


def _far_apart(held: ReplicatedState, transport: Transport, everyones: Sequence[_Told]) -> list[_Apart]:
    """Collective where checksums differ: every parameter is compared with that of a rank whose checksum most have."""
    shapes = {name: shape for theirs in everyones for name, shape in theirs.shapes.items()}
    found = []
    for name, shape in shapes.items():
        sums = {rank: theirs.sums[name] for rank, theirs in enumerate(everyones) if name in theirs.sums}
        most, _ = Counter(sums.values()).most_common(1)[0]
        if all(one == most for one in sums.values()):
            continue
        root = next(rank for rank, one in sums.items() if one == most)
        away = transport.share(_distance(held.parameters.get(name), shape, transport, root))
        found += [_Apart(name, rank, root, away[rank]) for rank, one in sums.items() if one != most]
    return found


def _distance(value: Tensor | None, shape: tuple[int, ...], transport: Transport, root: int) -> float:
    """Collective: of a tensor from that of another rank, over its norm; in blocks, so that memory for one is needed."""
    dtype, device = transport.share(None if value is None else (value.dtype, value.device.type))[root]
    mine = torch.zeros(shape, dtype=dtype, device=device) if value is None else value.detach()
    square, whole = 0.0, 0.0
    for block in mine.reshape(-1).split(BLOCK):
        theirs = block.clone()
        transport.spread(theirs, root)
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        one, other = block.to(wide), theirs.to(wide)
        is_same = (one == other) | (one.isnan() & other.isnan())
        square += float(torch.where(is_same, 0, one - other).abs().square().sum().nan_to_num(torch.inf))
        whole += float(other.abs().square().nan_to_num(0.0).sum())
    return float((square / (whole or 1.0)) ** 0.5) if square else 0.0


def warn(comparison: DriftReport, transport: Transport) -> None:
    """Rank 0 says what is no more than rounding."""
    if comparison.warning and transport.place.rank == 0:
        warnings.warn(comparison.warning, stacklevel=2)


def refuse_drift(held: Callable[[], ReplicatedState], transport: Transport, serve: Callable[[], None]) -> None:
    """After a step, on all ranks: looks in steps 3, 10, 100 and every 1,000.

    Args:
        serve: waits for ranks that look at rows on their own before they step.

    Raises:
        RuntimeError: ranks hold a parameter otherwise; the message names it, and who. If that is little more than
            rounding, it is a warning.
    """
    if transport.place.workers == 1 or not is_looked_at(transport.step):
        return
    with transport.unrecorded():
        serve()
        comparison = compare(held(), transport, f"after step {transport.step}")
    warn(comparison, transport)
    if comparison.error:
        raise RuntimeError(f"rank {transport.place.rank}: {comparison.error}")


def differing(units: Sequence[Any]) -> dict[str, nn.Parameter]:
    """The parameters whose values differ between ranks, by name."""
    found: dict[str, nn.Parameter] = {}
    for unit in units:
        if isinstance(unit, DenseUnit) and not unit.exchange.keeps_replicas_alike:
            found |= zip(unit.bucket.layout.names, unit.parameters, strict=True)
    return found


def differing_buffers(units: Sequence[Any], model: nn.Module) -> list[BufferPlace]:
    """The buffers of replicas that differ."""
    return buffers_of(model) if differing(units) else []
