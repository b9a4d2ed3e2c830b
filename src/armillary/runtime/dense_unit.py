"""A dense group at work: its bucket, its exchange, and the state that the exchange keeps on this rank.

The next state counts only when the result has landed, and what may not enter it is decided here for every exchange
alike. Where some rank's gradients are not finite, no state moves on any rank: gradients become NaN everywhere (a
GradScaler then skips the step on all ranks). That holds for all groups of a backward that keep states, whichever of
them it was. Weights that are not finite are never sent (`weight_averaging.py`). Where no rank used a parameter, its
state stays.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary.exchanges.averaged_gradients import averaging
from armillary.exchanges.dense import DenseExchange, Meeting, PushResult
from armillary.plans.parcel import Parcel, RankInfo, State
from armillary.plans.requests import Program, Scope
from armillary.runtime.bucket import Bucket, layout_beside
from armillary.transport.in_flight import Leaving

__all__ = ["TWICE", "DenseUnit", "dense_unit", "nonfinite_together", "warned_of_a_second_push"]

TWICE = (
    "got a gradient twice in one backward: it is used in several parts under reentrant activation checkpointing, or "
    "inside such a part and outside; take torch.utils.checkpoint with use_reentrant=False"
)


@dataclass(eq=False)
class DenseUnit:
    """carrier: what carries its gradients in the backward that goes on; None: nothing does, and each rank steps by its
    own. beside: that which averages gradients of weights, by scope. is_shown: whether the user sees them. spare: a
    second bucket, if what one backward sends is still under way in the next: they take turns. pushes, skipped: how many
    there were, and those of which nothing counted, as some rank's numbers were not finite. rewritten: names of
    parameters into which forwards write, on each rank by what it read (max_norm), so that replicas of them differ."""

    name: str
    bucket: Bucket
    exchange: DenseExchange
    state: State = field(default_factory=dict)
    carrier: DenseExchange | None = None
    beside: dict[Scope, DenseExchange] = field(default_factory=dict)
    is_shown: bool = True
    spare: Bucket | None = None
    pushes: int = 0
    skipped: int = 0
    rewritten: Collection[str] = ()

    def __post_init__(self) -> None:
        self.beside |= {one.scope: averaging(one) for one in self.exchange.gradients}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.bucket.parameters

    @property
    def leaves(self) -> bool:
        """Whether its gradients leave in the backward that goes on."""
        return self.carrier is not None

    @property
    def crosses_all(self) -> bool:
        """Whether they reach all ranks then, and not those of a node alone."""
        return self.carrier is not None and self.carrier is not self.beside.get("node")

    @property
    def may_leave(self) -> bool:
        """Whether its gradients do in some."""
        return self.exchange.carries == "gradient" or bool(self.beside)

    def begin_anew(self, place: RankInfo) -> None:
        """The exchange begins, with the weights that the model has now. Gradients in the bucket are lost.

        Raises:
            ValueError: it begins with a state that no checkpoint could keep.
        """
        if self.exchange.is_guarded:
            self.bucket.leave_kept()
            with torch.no_grad():
                weights = self.bucket.weigh_in().values.clone()
                self.bucket.flat.zero_()
            self.state = self.exchange.begin(self.bucket.layout, place, weights)
            if misfit := self.exchange.misfit(self.bucket.layout, self.state):
                raise ValueError(f"{self.name}: the exchange's {misfit}")

    def double(self) -> None:
        """From now on what a backward sends lands when the next one is over."""
        self.spare = Bucket(self.bucket.parameters, self.bucket.layout)

    def open(self, steps: int) -> None:
        """A backward begins, of the step after which so many are complete."""
        if self.spare is not None:
            self.bucket, self.spare = self.spare, self.bucket
        self.carrier = self._carrier(steps)
        if self.is_shown:
            self.bucket.leave_kept()
        self.bucket.reset()

    def _carrier(self, steps: int) -> DenseExchange | None:
        if self.exchange.carries == "gradient":
            return self.exchange if self.exchange.due(steps) else None
        return next((self.beside[one.scope] for one in self.exchange.gradients if one.due(steps)), None)

    def meets(self, steps: int, meeting: Meeting = "after") -> bool:
        """Whether its weights are exchanged after, or before, the optimizer's step after which so many are complete."""
        exchange = self.exchange
        return exchange.carries == "weights" and exchange.meeting == meeting and exchange.due(steps)

    def weigh_in(self) -> Parcel:
        """The weights, to be sent; gradients that the user may still see stay as they are."""
        if self.beside:
            self.bucket.set_apart()
        return self.bucket.weigh_in()

    def push(self, parcel: Parcel, place: RankInfo) -> Program[PushResult]:
        """What the exchange carries."""
        return self.exchange.push(parcel, self.state, place)

    @torch.no_grad()
    def leave(
        self, place: RankInfo, scale: float, contributes: bool = True, mean_weight: float = 1.0, loss_scale: float = 1.0
    ) -> Leaving:
        """Gradients, packed (`Bucket.seal`), by their carrier of this backward."""
        carrier = self.carrier or self.exchange
        parcel = replace(self.bucket.seal(scale, contributes, mean_weight), scale=loss_scale)
        return Leaving(carrier.push(parcel, self.state, place), carrier.requests)

    def take_gradients(self, moved: PushResult) -> None:
        """The result has landed: `.grad` becomes final."""
        self.bucket.withdraw(self._landed(moved, self.bucket))

    def means(self, moved: PushResult, bucket: Bucket) -> dict[nn.Parameter, Tensor]:
        """The result has landed: the final gradients, of the parameters that some rank used.

        Args:
            bucket: that was sent.
        """
        return bucket.means(self._landed(moved, bucket))

    def _landed(self, moved: PushResult, bucket: Bucket) -> Parcel:
        result, _ = moved
        if result.nonfinite:
            for view in bucket.views:  # not what lies between them, which the next parcel holds too
                view.fill_(float("nan"))
            result = result.answered(bucket.values, result.tail)
        if self.exchange.carries == "gradient":
            self._commit(moved)
        return result

    def take_weights(self, moved: PushResult) -> None:
        """The result has landed: it replaces the weights."""
        self.bucket.weigh_out(moved[0])
        self._commit(moved)

    def _commit(self, moved: PushResult) -> None:
        result, state = moved
        self.pushes, self.skipped = self.pushes + 1, self.skipped + bool(result.nonfinite)
        if not self.exchange.is_guarded or result.nonfinite:
            return
        unused = [number for number, used in enumerate(result.used.tolist()) if used == 0]
        self.state = self._without(unused, state) if unused else state

    def _without(self, unused: Sequence[int], state: State) -> State:
        """The state with what stood for those parameters before."""
        kept = {entry: value.clone() for entry, value in state.items()}
        for entry, value in kept.items():
            for number in unused:
                begin, end = self.exchange.span(entry, self.bucket.layout, number)
                value[begin:end] = self.state[entry][begin:end]
        return kept


def nonfinite_together(landed: Sequence[Any], units: Sequence[object]) -> list[Any]:
    """What came back of these units in one backward: where one of them is not finite, none is that keeps a state, since
    the step that would apply their gradients is left out."""
    guarded = [isinstance(unit, DenseUnit) and unit.exchange.is_guarded for unit in units]
    most = max(
        (moved[0].nonfinite for moved, is_guarded in zip(landed, guarded, strict=True) if is_guarded), default=0.0
    )
    if not most:
        return list(landed)
    return [_nonfinite(moved, most) if is_guarded else moved for moved, is_guarded in zip(landed, guarded, strict=True)]


def _nonfinite(moved: PushResult, ranks: float) -> PushResult:
    result, state = moved
    return replace(result, tail=torch.cat([result.tail[:-1], result.tail.new_tensor([ranks])])), state


def warned_of_a_second_push(units: Sequence[object], arrived: nn.Parameter) -> bool:
    """Warns if gradients that crossed since the last step are there still, so that they would be coded once more.

    Where a step was left out, as after an overflow, they are gone, but for what has just arrived.
    """
    coded = [unit for unit in units if isinstance(unit, DenseUnit) and unit.carrier and unit.carrier.is_guarded]
    others = [p for unit in coded for p in unit.parameters if p is not arrived and p.grad is not None]
    if not any(bool(p.grad.any()) for p in others if p.grad is not None):
        return False
    warnings.warn(
        f"step: backward() ran twice before optimizer.step(), so what the first brought of {coded[0].name} is coded "
        "a second time; put all but the last backward() of a step under run.no_sync()",
        stacklevel=2,
    )
    return True


def dense_unit(
    name: str,
    members: dict[str, nn.Parameter],
    exchange: DenseExchange,
    place: RankInfo,
    listable: Collection[str] = (),
) -> DenseUnit:
    """Args:
    members: of one dtype and device, by name, with the values that training begins with.
    listable: names of those whose optimizer takes a gradient as rows.
    """
    layout = layout_beside(list(members.values()), list(members), exchange.align, exchange.is_guarded)
    unit = DenseUnit(name, Bucket(list(members.values()), layout, listable if exchange.takes_rows else ()), exchange)
    unit.begin_anew(place)
    return unit
