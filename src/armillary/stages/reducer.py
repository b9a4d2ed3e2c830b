"""Gradients of one stage on their way to its optimizer: collected over micro-batches, summed over ranks.

`StepMeans` is the mean over the micro-batches of a step that run here. Note [Sums in place]. A step's first gradient
becomes the sum, to which the others are added, as in torch's own accumulation. Torch hands out no tensor that anyone
else holds, but two may share memory (the gradients of `a.view(-1) + b.view(-1)` do), so what one backward made of the
same memory is parted. And the sum of the last step is let go only when the first gradient of this one is there, tensor
by tensor: let go all at once, its memory goes back to the kernel, which clears as many pages anew at every step (46,000
of them, 78 of 290 ms, for a stage of 76 MB).

`StageSums`: where several ranks run a stage, a flat sum goes from one to the next (`FlatStage`: one tensor per dtype,
with a count behind it for every parameter, of how many workers used it). What arrives is added to in place, and a rank
that is the first packs its own. The sum is divided once, where it is whole. Of parameters that two stages share, the
stage that owns them adds a copy's gradients to its own; the sum takes the copy's place. A parameter that nobody used
keeps no gradient, and one that some used counts zero elsewhere, as in one process.

`Reducer` takes the groups of a stage to their mean over replicas. Gradients are put in while backward makes them. Once
the step is released, a group whose last one is there leaves, from inside that backward if it goes on: what is left of
it hides what travels. Groups leave in the order given, the plan's, on every rank alike, whatever order their gradients
come in; what got none leaves at the end, as unused (design law 8).

Source: Li et al., PyTorch Distributed (VLDB 2020): its reducer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from armillary.plans.parcel import RankInfo
from armillary.plans.requests import Scope, along
from armillary.runtime.bucket import Bucket
from armillary.runtime.dense_unit import DenseUnit
from armillary.schedules.clipping import square_of_stage
from armillary.schedules.instructions import StageMessage
from armillary.stages.partition import Tie
from armillary.transport.in_flight import LaunchQueue, Leaving
from armillary.transport.requests import Requests

__all__ = ["FlatStage", "Flats", "Means", "Reducer", "SharedGradients", "StageSums", "StepMeans", "shared_gradients"]

Means = Mapping[nn.Parameter, Tensor]  # gradients, in the order of the stage's parameters
Take = Callable[[int, nn.Parameter, Tensor], None]  # step, parameter, mean gradient


class StepMeans:
    """`expect`, `add` and `complete` collect the gradients of a step in micro-batch order.

    Args:
        stage: its number. parameters: by the stage's own names.
        take: gets each mean as soon as it is final, instead of `complete`; it copies what it gets.
    """

    def __init__(
        self, stage: int, parameters: Mapping[str, nn.Parameter], micro_batches: int, take: Take | None = None
    ) -> None:
        self._stage, self._parameters, self._micro_batches, self._take = stage, parameters, micro_batches, take
        self._sums: dict[str, Tensor] = {}
        self._divided: set[str] = set()  # the sums that are means already
        self._first: list[str] = []  # the sums that this micro-batch began
        self._last_means: dict[str, Tensor] = {}  # of the last step, see Note [Sums in place]
        self._summing, self._added = 0, 0  # step, micro-batches
        self._last = (-1, -1)  # step and micro-batch that came last

    def expect(self, step: int, micro_batch: int) -> None:
        """What `add` gets from now on is of that micro-batch. Where each is a sum of its own, some come to other ranks.

        Raises:
            RuntimeError: out of order; the sum would differ from the reference's.
        """
        place, due = (step, micro_batch), (self._summing, self._added)
        if self._micro_batches == 1:
            is_out, wanted = place <= self._last, f"a later one than {self._last} was"
        else:
            is_out, wanted = place != due, f"step {self._summing}, micro-batch {self._added} was"
        if is_out:
            raise RuntimeError(
                f"stage {self._stage}: gradient of step {step}, micro-batch {micro_batch} came when {wanted} due"
            )
        self._summing, self._last = step, place

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one gradient, by the stage's own name; a parameter that was not used gets none."""
        if name not in self._sums:
            if self._micro_batches == 1 and self._take is not None:  # nothing is added to it
                self._take(self._summing, self._parameters[name], gradient)
                return
            self._sums[name] = gradient
            self._first.append(name)
            self._last_means.pop(name, None)
            return
        self._sums[name].add_(gradient)
        if self._added == self._micro_batches - 1:  # divided while the processor still has it at hand
            self._sums[name].div_(self._micro_batches)
            self._divided.add(name)
            if self._take is not None:
                self._take(self._summing, self._parameters[name], self._sums.pop(name))

    def complete(self, beside: Iterable[Tensor | None] = ()) -> Means | None:
        """The micro-batch has given all. Returns the step's means if it was the last, without those that `take` got.

        Args:
            beside: what else the same backward has made, and what it was given.
        """
        self._part(beside)
        self._added += 1
        if self._added < self._micro_batches:
            return None
        means = self._means()
        if self._take is not None:
            for parameter, mean in means.items():
                self._take(self._summing, parameter, mean)
            means = {}
        self._summing, self._added = self._summing + 1, 0
        self._sums.clear()
        self._divided.clear()
        return means

    def keep(self, means: Means) -> None:
        """Those of the last step, with which the optimizer has stepped; see Note [Sums in place]."""
        self._last_means = {name: means[p] for name, p in self._parameters.items() if p in means}

    def _part(self, beside: Iterable[Tensor | None]) -> None:
        """Copies the new sums whose memory is also another's; see Note [Sums in place]."""
        taken = {_memory(tensor) for tensor in beside if tensor is not None}
        for name in self._first:
            if (memory := _memory(self._sums[name])) in taken:
                self._sums[name] = self._sums[name].clone()
            taken.add(memory)
        self._first.clear()

    def _means(self) -> Means:
        for name in self._sums.keys() - self._divided if self._micro_batches > 1 else ():
            self._sums[name].div_(self._micro_batches)
        return {parameter: self._sums[name] for name, parameter in self._parameters.items() if name in self._sums}


def _memory(tensor: Tensor) -> int:
    """What tells the memory of one tensor from another's. Only dense tensors are changed in place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


Flats = list[Tensor]  # one per dtype


class FlatStage:
    """Where the trainable parameters of a stage lie; holds no tensor of its own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            self._groups.setdefault((parameter.dtype, parameter.device), []).append(place)

    def pack_weights(self, weights: Sequence[Tensor]) -> Flats:
        """Copies of the weights, in the order of `parameters`."""
        return [torch.cat([weights[p].detach().reshape(-1) for p in places]) for places in self._groups.values()]

    def unpack_weights(self, flats: Flats) -> list[Tensor]:
        """Views into `flats`, in the order of `parameters`."""
        found: dict[int, Tensor] = {}
        for flat, places in zip(flats, self._groups.values(), strict=True):
            for place, part in zip(places, flat.split([self.parameters[p].numel() for p in places])):
                found[place] = part.view(self.parameters[place].shape)
        return [found[place] for place in range(len(self.parameters))]

    def pack_gradients(self, gradients: Sequence[Tensor | None]) -> Flats:
        """Copies of the gradients, then one count each: 1, or 0 (with zeros) for a parameter that was not used."""
        flats = []
        for (dtype, device), places in self._groups.items():
            parts = []
            for place in places:
                gradient = gradients[place]
                parts.append(torch.zeros_like(self.parameters[place]) if gradient is None else gradient)
            counts = torch.tensor([float(gradients[p] is not None) for p in places], dtype=dtype, device=device)
            flats.append(torch.cat([*(part.detach().reshape(-1) for part in parts), counts]))
        return flats

    def add_gradients(self, flats: Flats, gradients: Sequence[Tensor | None]) -> None:
        """Adds to sums that another worker packed, in place."""
        for flat, places in zip(flats, self._groups.values(), strict=True):
            *parts, counts = flat.split([*(self.parameters[p].numel() for p in places), len(places)])
            used = [gradients[place] is not None for place in places]
            for part, place in zip(parts, places):
                gradient = gradients[place]
                if gradient is not None:
                    part.add_(gradient.detach().reshape(-1))
            counts.add_(torch.tensor(used, dtype=flat.dtype, device=flat.device))

    def unpack_gradients(self, flats: Flats) -> dict[int, Tensor]:
        """Views of the sums that anybody added to, by their place in `parameters`."""
        found: dict[int, Tensor] = {}
        for flat, places in zip(flats, self._groups.values(), strict=True):
            *parts, counts = flat.split([*(self.parameters[p].numel() for p in places), len(places)])
            for place, part, count in zip(places, parts, counts.tolist()):
                if count:
                    found[place] = part.view(self.parameters[place].shape)
        return found


@dataclass(frozen=True)
class _Sent:
    """Of one step."""

    queue: LaunchQueue
    buckets: Sequence[Bucket]


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
    _sent: dict[int, _Sent] = field(default_factory=dict)  # by step
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
        with torch.no_grad():
            for unit, bucket, moved in zip(self.units, sent.buckets, sent.queue.land(), strict=True):
                found |= unit.means(moved, bucket)
        return found

    @property
    def _scale(self) -> float:
        """Before gradients are added, as DDP does: no sum exceeds what one process would have."""
        return 1.0 / self.place.workers

    def _open(self, step: int) -> None:
        if step == self._opened:
            return
        self._opened = step
        for unit in self.units:
            unit.open(step + 1)
        self._sent[step] = _Sent(LaunchQueue(self.requests, self.units), [unit.bucket for unit in self.units])

    def _launch_ready(self, step: int) -> None:
        if self._released != step:
            return
        self._open(step)
        if self._has_states:  # what an exchange keeps is that of the push before
            for earlier in [one for one in self._sent if one < step]:
                self._landed[earlier] = self._land(earlier)
        self._sent[step].queue.launch(self._leave, lambda unit: self._closed == step or unit.bucket.is_ready)

    def _leave(self, unit: DenseUnit) -> Leaving:
        program, requests = unit.leave(self.place, self._scale)
        return Leaving(along(program, self.scope), requests)


@dataclass(frozen=True, eq=False)
class SharedGradients:
    """
    Args:
        owner: the stage that owns them. flat: as they travel.
    """

    owner: int
    flat: FlatStage

    def packed(self, means: Means) -> Flats:
        """Those of the shared parameters."""
        return self.flat.pack_gradients([means.get(parameter) for parameter in self.flat.parameters])

    def added(self, means: Means, came: Flats) -> Means:
        """At the owner: with a copy's."""
        found = dict(means)
        for place, gradient in self.flat.unpack_gradients(came).items():
            parameter = self.flat.parameters[place]
            found[parameter] = found[parameter] + gradient if parameter in found else gradient
        return found

    def replaced(self, means: Means, came: Flats) -> Means:
        """At a copy: by the sums."""
        sums = self.flat.unpack_gradients(came)
        return {**means, **{self.flat.parameters[place]: gradient for place, gradient in sums.items()}}

    def without(self, means: Means) -> Means:
        """What the stage does not share."""
        shared = {*self.flat.parameters}
        return {parameter: mean for parameter, mean in means.items() if parameter not in shared}


def shared_gradients(ties: Mapping[int, Tie]) -> dict[int, SharedGradients]:
    """By the stage that holds copies."""
    return {stage: SharedGradients(tie.owner, FlatStage(tie.parameters)) for stage, tie in ties.items()}


class StageSums:
    """
    Args:
        flat: the stage's layout.
        ranks: that make a sum together; each has divided by the number of its own micro-batches.
        shared: what stages share, by the one that has copies. The other counts them in its norm.
        stage: the number of this one.
    """

    def __init__(
        self, flat: FlatStage, ranks: int, shared: Mapping[int, SharedGradients] = MappingProxyType({}), stage: int = 0
    ) -> None:
        self._flat, self._ranks, self._shared, self._copies = flat, ranks, shared, shared.get(stage)
        self._own: dict[int, Means] = {}  # by step
        self._coming: dict[int, Callable[[], Means]] = {}  # means over replicas
        self._sums: dict[int, Flats] = {}

    def put(self, step: int, means: Means) -> None:
        """This rank's gradients of a step."""
        self._own[step] = means

    def expect(self, step: int, mean: Callable[[], Means]) -> None:
        """Their mean over replicas is on its way; `mean` waits for it."""
        self._coming[step] = mean

    def _landed(self, step: int) -> None:
        if step in self._coming:
            found = self._coming.pop(step)()
            self._own[step] = {p: found[p] for p in self._flat.parameters if p in found}

    def join(self, message: StageMessage, came: Flats) -> None:
        """Gradients of another rank, or the sum of several, with what is here. Of what stages share: a copy's are
        added to those here, or their sum takes the place of the copy's here."""
        step = message.step
        if message.what in ("copy's gradient", "shared gradient"):
            shared, own = self._shared[message.stage], self._whole(step)
            found = shared.added(own, came) if message.what == "copy's gradient" else shared.replaced(own, came)
            self._own[step] = {p: found[p] for p in self._flat.parameters if p in found}
            return
        if step in self._own:
            own = self._own.pop(step)
            self._flat.add_gradients(came, [own.get(parameter) for parameter in self._flat.parameters])
        elif step in self._sums:
            came = [flat.add_(more) for flat, more in zip(self._sums[step], came, strict=True)]
        self._sums[step] = came

    def packed(self, step: int) -> Flats:
        """What is here, for another rank; it is taken away."""
        if step in self._sums:
            return self._sums.pop(step)
        own = self._own.pop(step)
        return self._flat.pack_gradients([own.get(parameter) for parameter in self._flat.parameters])

    def shared(self, message: StageMessage) -> Flats:
        """What is here of the parameters that another stage shares."""
        return self._shared[message.stage].packed(self._whole(message.step))

    def _whole(self, step: int) -> Means:
        """This rank's, when all is here."""
        self._landed(step)
        return self._own[step]

    def square(self, step: int) -> Tensor:
        """Of the norm of the mean, when all is here."""
        self._landed(step)
        if step in self._own:
            own = self._own[step]
            return square_of_stage((own if self._copies is None else self._copies.without(own)).values())
        found = self._flat.unpack_gradients(self._sums[step])
        return square_of_stage(found[place] / self._ranks for place in sorted(found))

    def mean(self, step: int) -> Means:
        """When all is here; it is taken away."""
        self._landed(step)
        if step not in self._sums:
            return self._own.pop(step)
        found = self._flat.unpack_gradients(self._sums.pop(step))
        with torch.no_grad():
            return {self._flat.parameters[place]: found[place].div_(self._ranks) for place in sorted(found)}
