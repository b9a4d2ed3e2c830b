"""The groups of one stage on their way to their mean over replicas: each leaves as soon as its gradients are final.

Gradients are put in while backward makes them. Once the step is released, a group whose last one is there leaves, from
inside that backward if it goes on: what is left of it hides what travels. Groups leave in the order given, the plan's,
on every rank alike, whatever order their gradients come in; what got none leaves at the end, as unused (design law 8).

Source: Li et al., PyTorch Distributed (VLDB 2020): its reducer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.exchanges.exchange import RankInfo
from armillary.facts.collectives import Scope, along
from armillary.runtime.channel import Requests
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.hybrid.bucket import Bucket
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.in_flight import InFlight, see_through

__all__ = ["Reducer"]


class _Sent(NamedTuple):
    bucket: Bucket
    flight: InFlight


@dataclass(eq=False)
class Reducer:
    """Between steps: idle, or with the flights of steps whose mean nobody has taken yet.

    Args:
        units: the groups, in the order in which they leave.
        place, scope: of this rank among the replicas. requests: to the others.
    """

    units: Sequence[DenseUnit]
    place: RankInfo
    requests: Requests
    scope: Scope
    _opened: int = -1  # the last step of which a gradient has come; likewise
    _released: int = -1
    _closed: int = -1
    _sent: dict[int, list[_Sent]] = field(default_factory=dict)  # by step
    _landed: dict[int, Means] = field(default_factory=dict)  # that nobody has taken yet

    def __post_init__(self) -> None:
        self._has_states = any(unit.exchange.is_guarded for unit in self.units)
        self._at = {p: (unit, number) for unit in self.units for number, p in enumerate(unit.parameters)}

    def put(self, step: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient of this rank's is final. It is copied."""
        self._open(step)
        unit, number = self._at[parameter]
        if number not in unit.bucket.waiting:
            raise RuntimeError(
                f"{unit.bucket.layout.names[number]} of shape {tuple(parameter.shape)} got a second gradient in one "
                "step, after the first had been given away (a checkpoint with use_reentrant=True?)"
            )
        with torch.no_grad():
            unit.bucket.put(number, gradient, self._scale)
        self._launch_ready(step)

    def release(self, step: int) -> None:
        """Groups of the step may leave."""
        self._released = step
        self._launch_ready(step)

    def close(self, step: int) -> None:
        """All gradients of the step have come."""
        self._closed = step
        self._launch_ready(step)

    def mean(self, step: int) -> Means:
        """Waits for the mean over replicas; what no rank used is left out."""
        return self._landed.pop(step) if step in self._landed else self._land(step)

    def _land(self, step: int) -> Means:
        sent, found = self._sent.pop(step), dict[nn.Parameter, Tensor]()
        see_through([flight for _, flight in sent], self.requests)
        with torch.no_grad():
            for unit, (bucket, flight) in zip(self.units, sent, strict=True):
                found |= unit.means(flight.finish(self.requests), bucket)
        return found

    @property
    def _scale(self) -> float:
        """Before gradients are added, as DDP does: no sum exceeds what one process would have."""
        return 1.0 / self.place.workers

    def _open(self, step: int) -> None:
        if step == self._opened:
            return
        self._opened, self._sent[step] = step, []
        for unit in self.units:
            unit.open(step + 1)

    def _launch_ready(self, step: int) -> None:
        if self._released != step:
            return
        self._open(step)
        if self._has_states:  # what an exchange keeps is that of the push before
            for earlier in [one for one in self._sent if one < step]:
                self._landed[earlier] = self._land(earlier)
        sent = self._sent[step]
        while len(sent) < len(self.units) and (self._closed == step or self.units[len(sent)].bucket.is_ready):
            self._launch(sent)

    def _launch(self, sent: list[_Sent]) -> None:
        """The next group leaves; what left before makes its next request then."""
        unit = self.units[len(sent)]
        with torch.no_grad():
            program = unit.push(unit.bucket.seal(self._scale), self.place)
            flight = InFlight(along(program, self.scope), unit.name, unit.exchange.requests - 1)
            flight.begin(self.requests)
        for _, earlier in sent:
            earlier.advance(self.requests)
        sent.append(_Sent(unit.bucket, flight))
