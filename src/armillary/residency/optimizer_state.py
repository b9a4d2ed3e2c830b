"""The optimizer's state in the tier: a step goes stage by stage, and only stages at hand have their state in memory.

Each of these calls is the optimizer's own function without its hooks, with the gradients of one stage. Hooks,
schedulers and runs see one step. While the state of one stage is used, that of the next is read. Whoever asks for state
that is away, such as a checkpoint, gets it read back first.

Source: KARMA (Wahib et al., SC20), its data-parallel form. Departure: weights stay in memory.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.residency.swap import SMALL_BYTES, Stored, Waits, storage_of
from armillary.residency.tier import Tier

__all__ = ["AwayState", "refuse_optimizer", "state_bytes"]


@dataclass(frozen=True)
class _Entry:
    """A tensor of the state that is away."""

    key: str
    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _States(defaultdict[Tensor, Any]):
    """Stands in for optimizer.state: the same mapping, and what is away is read back as it is asked for."""

    def __init__(self, found: dict[Tensor, Any], tier: Tier, waits: Waits) -> None:
        super().__init__(dict, found)
        self._tier, self._waits = tier, waits
        self._away: dict[Tensor, list[_Entry]] = {}

    def send(self, parameter: Tensor) -> None:
        """To the tier, from now on."""
        entries = []
        if not self.__contains__(parameter) or parameter in self._away:
            return
        for key, value in list(super().__getitem__(parameter).items()):
            storage = storage_of(value) if isinstance(value, Tensor) else None
            if storage is None or not SMALL_BYTES <= value.nbytes == storage.nbytes():
                continue  # small, or a view of something larger
            stored = Stored("optimizer state", value, storage)
            stored.takes_left = 1
            entries.append(_Entry(key, stored, value.dtype, value.size(), value.stride()))
            super().__getitem__(parameter)[key] = None
            stored.leave(self._tier, self._waits)
        if entries:
            self._away[parameter] = entries

    def wait_until_gone(self, parameter: Tensor) -> None:
        for one in self._away.get(parameter, ()):
            one.stored.wait_until_gone(self._waits)

    def fetch(self, parameter: Tensor) -> None:
        for one in self._away.get(parameter, ()):
            one.stored.fetch(self._waits)

    def come_back(self) -> dict[Tensor, Any]:
        """All of it, in memory."""
        return {parameter: self[parameter] for parameter in list(self)}

    def __getitem__(self, parameter: Tensor) -> Any:
        state = super().__getitem__(parameter)
        for one in self._away.pop(parameter, ()):
            flat = one.stored.take(self._waits)
            there = torch.empty(0, dtype=one.dtype, device=flat.device)
            state[one.key] = there.set_(flat.untyped_storage(), 0, one.size, one.stride)
        return state

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        for one in self._away.pop(parameter, ()):
            one.stored.drop()
        super().__setitem__(parameter, state)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default  # noqa: SIM401  it is what `get` is made of

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        if parameter in self:
            self[parameter]
        return super().pop(parameter, *default)

    def items(self) -> Any:
        return self.come_back().items()

    def values(self) -> Any:
        return self.come_back().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(defaultdict(dict, self.come_back()), memo)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, self.come_back())


class AwayState:
    """From construction until `remove`."""

    def __init__(self, optimizer: Optimizer, stages: Sequence[nn.Module], tier: Tier, waits: Waits) -> None:
        self._optimizer, self._stages = optimizer, stages
        self._kind = type(optimizer)
        self._own = _unhooked(self._kind)
        self._states = _States(optimizer.state, tier, waits)
        optimizer.state = self._states
        self._is_on = True
        away, own = self, self._own

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return away.step(closure) if self is away._optimizer and away._is_on else own(self, closure)

        optimizer.__class__ = type(self._kind.__name__, (self._kind,), {"step": step, "__module__": __name__})
        optimizer._patch_step_function()  # hooks of the step run around it, once
        self._counted = vars(optimizer).pop("step", None)
        if self._counted is not None:  # a scheduler's, which notes that a step was made
            optimizer.step = _noted(optimizer)  # type: ignore[method-assign]
        for parts in self._parts():
            for parameter in parts:
                self._states.send(parameter)

    def remove(self) -> None:
        """The state is back in memory, the optimizer as it was."""
        optimizer = self._optimizer
        if self._counted is not None:
            optimizer.step = self._counted  # type: ignore[method-assign]
        self._is_on = False  # a scheduler that was made meanwhile still calls the step above
        optimizer.__class__ = self._kind
        optimizer.state = defaultdict(dict, self._states.come_back())

    def step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {one: one.grad for one in _parameters(self._optimizer)}
        parts = list(self._parts())
        try:
            for one in grads:
                one.grad = None
            self._read(parts, 0)
            for number, part in enumerate(parts):
                if number >= 2:  # its bytes make room for what is read now
                    for one in parts[number - 2]:
                        self._states.wait_until_gone(one)
                self._read(parts, number + 1)
                for one in part:
                    one.grad = grads[one]
                self._own(self._optimizer)
                for one in part:
                    one.grad = None
                    self._states.send(one)
        finally:
            for one, grad in grads.items():
                one.grad = grad
        return loss

    def _read(self, parts: Sequence[Sequence[Tensor]], number: int) -> None:
        for one in parts[number] if number < len(parts) else ():
            self._states.fetch(one)

    def _parts(self) -> Iterator[list[Tensor]]:
        """What the optimizer holds of each stage, in the order of forward; first what is in none."""
        held = list(dict.fromkeys(_parameters(self._optimizer)))
        of: dict[Tensor, int] = {}
        for number, stage in enumerate(self._stages):
            of.update(dict.fromkeys(stage.parameters(), number))
        for number in range(-1, len(self._stages)):
            if part := [one for one in held if of.get(one, -1) == number]:
                yield part


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unhooked(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step as the optimizer's author wrote it."""
    step: Any = kind.step
    own: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def _noted(optimizer: Optimizer) -> Callable[..., Any]:
    kind: Any = type(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return kind.step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # how torch's schedulers know their own
    return step


def _like(optimizer: Optimizer, weights: Sequence[Tensor]) -> Optimizer:
    """Another one of the kind with its options. Defaults hold more than the constructor takes, for some."""
    taken = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return type(optimizer)([one.requires_grad_() for one in weights], **options)


def _tried(optimizer: Optimizer, by_part: bool) -> list[Tensor]:
    """Small weights after three steps of another optimizer of the kind, at once or in two parts."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        [torch.randn(6, 4, generator=draw)],
        [torch.randn(4, 6, generator=draw), torch.randn(5, 3, generator=draw)],
    ]
    weights = [one for part in parts for one in part]
    trial = _like(optimizer, weights)
    own = _unhooked(type(trial))
    for _ in range(3):
        grads = [3 * torch.randn(one.shape, generator=draw) for one in weights]
        of = dict(zip(weights, grads, strict=True))
        for part in parts if by_part else [weights]:
            for one in weights:
                one.grad = of[one].clone() if any(one is other for other in part) else None
            own(trial)
    return [one.detach() for one in weights]


def refuse_optimizer(optimizer: Optimizer) -> None:
    """
    Raises:
        ValueError: a step by parts is not a step at once, for an optimizer of this kind and these options.
    """
    try:
        same = all(map(torch.equal, _tried(optimizer, True), _tried(optimizer, False)))
    except Exception as error:
        raise ValueError(
            f"residency: {type(optimizer).__name__} could not be tried stage by stage ({error}); leave out "
            "optimizer=, and its state stays in memory"
        ) from error
    if not same:
        raise ValueError(
            f"residency: {type(optimizer).__name__} mixes what it does to one parameter with others, so it cannot step "
            "stage by stage; leave out optimizer=, its state then stays in memory"
        )


def state_bytes(optimizer: Optimizer) -> int:
    """What the state takes, or will take after the first step: as many times the weights as a trial keeps."""
    there = sum(one.nbytes for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor))
    if there:
        return there
    weight = torch.zeros(64, 32, requires_grad=True)
    weight.grad = torch.ones(64, 32)
    try:
        trial = _like(optimizer, [weight])
        trial.step()
    except Exception:  # unknown until its first step; the report tells
        return 0
    kept = sum(one.nbytes for one in trial.state[weight].values() if isinstance(one, Tensor) and one.nbytes > 64)
    return round(kept / weight.nbytes * sum(one.nbytes for one in _parameters(optimizer)))
