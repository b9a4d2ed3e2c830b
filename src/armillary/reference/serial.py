"""The truth of an N-worker plan: plain PyTorch in one process, looping over the same N per-worker batches.

Each worker's batch runs with that worker's random stream; gradients are summed in worker order and scaled as declared;
then one step of the user's optimizer. Nothing is imported of exchanges or runtime, so it cannot share their faults.

Clipping takes the norm that the schedule's clipping names (`schedules/clipping.py`), over the mean gradients of one
step.

Coded rows (`CodedReads`) are coded one by one where they are read, and the table is as it was. Of one look-up,
gradients of equal rows are added up first, and what is coded is the part of the mean that they are. No gradient flows
through a codec, it passes by it. A `Crossing` joins a group of all workers by its exchange's oracle.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from armillary.exchanges.dense import DenseExchange
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.schedules.clipping import Clip, square_of_stage, square_of_step

__all__ = [
    "CodedReads",
    "Crossing",
    "Meanings",
    "clip_gradients",
    "flat",
    "keep_untouched_rows",
    "lying_as",
    "train_step",
]


def clip_gradients(
    stages: Sequence[nn.Module], clip: Clip, step: int, squares: dict[int, Tensor], drains: Collection[int]
) -> None:
    """A parameter that several stages hold counts in the first of them.

    Args:
        squares: of the whole gradient, by step; this step's is added.
    """
    first = {p: j for j, stage in reversed(list(enumerate(stages))) for p in stage.parameters()}
    trained = [
        [p for p in stage.parameters() if p.grad is not None and first[p] == j] for j, stage in enumerate(stages)
    ]
    own = {j: square_of_stage(p.grad for p in held if p.grad is not None) for j, held in enumerate(trained)}
    squares[step] = square_of_step(own)
    of = clip.step_of_norm(step, drains)
    for j, held in enumerate(trained):
        factor = clip.factor(own[j] if of is None else squares[of])
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * factor


Meaning = Callable[[Tensor], Tensor]  # of rows (k, *row), one by one


class Meanings(NamedTuple):
    """What arrives of rows that are read, and of their gradients."""

    rows: Meaning
    gradients: Meaning


class CodedReads(TorchFunctionMode):
    """Inside, look-ups of these tables read coded rows.

    Args:
        meanings: by table. part: of the mean that this worker's gradients are.
    """

    def __init__(self, meanings: Mapping[Tensor, Meanings], part: float) -> None:
        super().__init__()
        self._meanings, self._part = meanings, part

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if not any(isinstance(one, Tensor) and one in self._meanings for one in given):
            return func(*args, **kwargs)
        if func in (functional.embedding, functional.embedding_bag):
            return self._embedded(func, args, kwargs)
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor):
            rows, places, _ = self._read(args[0], torch.where(args[1] < 0, args[1] + len(args[0]), args[1]))
            return rows[places]
        if func in (Tensor.index_select, torch.index_select):
            rows, places, _ = self._read(args[0], kwargs["index"] if "index" in kwargs else args[2])
            return rows[places]
        return func(*args, **kwargs)  # shape, dtype, grad and the like

    def _embedded(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        asked = signature(func).bind(*args, **kwargs).arguments
        rows, places, distinct = self._read(asked["weight"], asked["input"])
        padding = asked.get("padding_idx")
        if padding is not None:
            there = (distinct == padding % len(asked["weight"])).nonzero()
            padding = int(there) if len(there) else None
        return func(**{**asked, "input": places, "weight": rows, "padding_idx": padding, "sparse": False})

    def _read(self, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coded rows that are read, each once; where each id stands among them; which they are."""
        distinct, places = torch.unique(ids, return_inverse=True)
        meanings = self._meanings[table]
        coded: Tensor = _Coded.apply(table[distinct], meanings, self._part)  # type: ignore[no-untyped-call]
        return coded, places, distinct


class _Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, meanings: Meanings, part: float) -> Tensor:
        ctx.gradients, ctx.part = meanings.gradients, part
        return meanings.rows(rows).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradients(gradient * ctx.part), None, None


def lying_as(like: Tensor, piece: Tensor) -> Tensor:
    """A piece of a flat tensor in that shape, and in the order in which such a tensor lies in memory."""
    return piece.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), piece.storage_offset())


def flat(layout: Layout, tensors: Sequence[Tensor | None]) -> Tensor:
    """Side by side; zeros for what there is not."""
    values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
    for tensor, (begin, end) in zip(tensors, layout.spans, strict=True):
        if tensor is not None:
            lying_as(tensor, values[begin:end]).copy_(tensor)
    return values


@dataclass(eq=False)
class Crossing:
    """
    Args:
        members: the parameters, with the values that training begins with. states: by worker.
    """

    names: tuple[str, ...]
    members: Sequence[nn.Parameter]
    exchange: DenseExchange
    workers: int
    states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        dtype, shapes = str(self.members[0].dtype).removeprefix("torch."), tuple(tuple(p.shape) for p in self.members)
        self.layout = Layout(self.names, shapes, dtype, self.exchange.align, self.exchange.is_guarded)
        weights = flat(self.layout, [one.detach() for one in self.members])
        places = [RankInfo(worker, self.workers) for worker in range(self.workers)]
        self.states = [self.exchange.begin(self.layout, place, weights) for place in places]

    def mean(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """By worker and parameter -> the mean that all get; None for a parameter that nobody used.

        A state stays as it was where some worker's numbers are not finite, and for what nobody used.
        """
        layout, parcels = self.layout, []
        for theirs in gradients:
            values = flat(layout, [None if one is None else one * (1.0 / self.workers) for one in theirs])
            tail = [float(one is not None) for one in theirs]
            tail += [float(not bool(values.isfinite().all()))] * layout.is_guarded
            parcels.append(Parcel(values, torch.tensor(tail, dtype=torch.float64), layout))
        results, after = self.exchange.oracle(parcels, self.states)
        is_nonfinite = any(parcel.nonfinite for parcel in parcels)
        is_used = [any(theirs[number] is not None for theirs in gradients) for number in range(len(layout.names))]
        for was, state in zip(self.states, after, strict=True):
            for number, used in enumerate(is_used):
                for entry, value in state.items() if is_nonfinite or not used else ():
                    begin, end = self.exchange.span(entry, layout, number)
                    value[begin:end] = was[entry][begin:end]
        self.states = after
        found: list[Tensor | None] = []
        for used, like, (begin, end) in zip(is_used, self.members, layout.spans, strict=True):
            mean = lying_as(like, results[0].values[begin:end].clone())
            found.append((torch.full_like(mean, float("nan")) if is_nonfinite else mean) if used else None)
        return found


Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    loss: Loss,
    weights: Sequence[float] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """One training step over `batches`, one per worker; returns each worker's loss.

    The gradient is sum_w weight_w g_w / sum_w weight_w; without weights, the mean over workers. A parameter that no
    worker used keeps grad None; one that some used counts as zero for the others. `before_step` is where a user
    clips.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shares = list(weights) if weights is not None else [1.0] * len(batches)
    total: list[Tensor | None] = [None] * len(parameters)
    losses = []
    for batch, share in zip(batches, shares, strict=True):
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, batch)
        value.backward()
        losses.append(float(value.detach()))
        for index, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            mine = gradient * share
            before = total[index]
            total[index] = mine if before is None else before + mine
    divisor = sum(shares) or 1.0
    for parameter, summed in zip(parameters, total, strict=True):
        parameter.grad = None if summed is None else summed / divisor
    if before_step is not None:
        before_step(model)
    optimizer.step()
    return losses


def keep_untouched_rows(model: nn.Module, optimizer: Optimizer, names: Sequence[str], step: Callable[[], None]) -> None:
    """The meaning of lazy rows: after `step`, rows of the named tables whose gradient is zero are put back where they
    were.

    Weight and row-shaped optimizer state alike. A row whose gradient happens to cancel to exactly zero counts as
    untouched here and as touched in the runtime; tests avoid that.
    """
    tables: Mapping[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if name in names}
    before = {name: (p.detach().clone(), _row_state(optimizer, p)) for name, p in tables.items()}
    step()
    for name, parameter in tables.items():
        weight, state = before[name]
        assert parameter.grad is not None
        still = parameter.grad.flatten(1).abs().sum(1) == 0 if parameter.dim() > 1 else parameter.grad == 0
        with torch.no_grad():
            parameter[still] = weight[still]
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value[still] = state[key][still] if key in state else 0.0


def _row_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
