"""What is coded where a pipeline is cut: the activation that goes on, and the gradient that comes back.

An edge has the number of the stage below it. It is written in a plan as a codec's choice, with two options more: of so
many first steps (`warm_up`) messages travel as they are, and evaluation does as training does, or not (`at_eval`). A
gradient by the choice `same` is coded as its activation is; where that keeps places, its numbers at these places travel
as they are, and the others are zeros on both sides.

Coded are floating numbers of two or more dimensions that ask for a gradient, where they leave the stage that made them:
flattened, a micro-batch at a time. All else travels as it is, so nothing is coded twice. What a code leaves out is
lost. No gradient flows through a codec, it passes by it (straight through).

A choice that is no codec's is looked up on the shelf `EDGES`: a method that remembers samples, whose two ends hold what
arrived of every sample, so that only its change is coded.

Source: Bian et al., "Does compressing activations help model parallel training?", MLSys 2024; DCT (Gupta et al., KDD
2021) for gradients in the places of their activations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from armillary.codecs.registry import Codec, Draw, codec_of, guarded
from armillary.plans.registry import Choice, Registry
from armillary.schedules.random_streams import place_seed
from armillary.schedules.schedule import Cell, Schedule

__all__ = [
    "EDGES",
    "IN_MEMORY_BYTES",
    "NEVER",
    "SAME",
    "Codes",
    "Edge",
    "EdgeCode",
    "Remembered",
    "at_eval",
    "codes_of",
    "draw_of",
    "hurried_edge",
    "is_codable",
    "refuse_edges",
    "remembering",
    "sample_keys",
    "warm_up_of",
]

SAME = Choice("same")
EVALS = ("same", "off")
IN_MEMORY_BYTES = 1 << 28  # of what an end holds of samples: more is in a file
NEVER = 1 << 62  # a step that no run reaches
KEY_BYTES = 8  # of a sample
SOON = 1  # the longest warm-up with which a few steps see it, and its end


class Edge(NamedTuple):
    """Of one stage, as a plan names them; None: as it is."""

    forward: Choice | None = None
    back: Choice | None = None


class EdgeCode(NamedTuple):
    """How messages of one kind are coded.

    Args:
        codec: guarded.
        warm_up: messages of earlier steps travel as they are; NEVER: all do, and say what is coded on the way back.
        leads: the places that it keeps are those of the gradient.
        follows: only numbers at the places that the activation kept travel; `codec` is not asked.
        cache_bytes: of samples that each end holds; what is coded is their change. 0: nothing is remembered.
    """

    codec: Codec
    warm_up: int = 0
    leads: bool = False
    follows: bool = False
    cache_bytes: int = 0

    @property
    def rests(self) -> bool:
        """Whether all its messages travel as they are."""
        return self.warm_up >= NEVER

    @property
    def is_fixed(self) -> bool:
        """Whether lengths of codes are known beforehand."""
        return self.codec.is_fixed and not self.follows and not self.cache_bytes


Codes = Mapping[tuple[str, int], EdgeCode]  # by what a message is and the stage that made it


def remembering(codes: Codes, stages: Iterable[int]) -> list[int]:
    """Of these stages those behind which an edge remembers samples."""
    return [j for j in stages if (code := codes.get(("activation", j))) is not None and code.cache_bytes]


def warm_up_of(choice: Choice | None) -> int:
    """For how many steps messages travel as they are, as it is written in a plan."""
    return 0 if choice is None else int(choice.options.get("warm_up", 0))


def hurried_edge(choice: Choice | None) -> Choice | None:
    """The same with a warm-up that ends in a few steps."""
    if choice is None or warm_up_of(choice) <= SOON:
        return choice
    return Choice(choice.name, {**choice.options, "warm_up": SOON})


def is_codable(tensor: Tensor) -> bool:
    """Of an activation that was made where it leaves."""
    return tensor.is_floating_point() and tensor.dim() >= 2 and tensor.layout == torch.strided


def draw_of(codec: Codec, seed: int, place: Cell, leaf: int, stages: int, is_back: bool) -> Draw:
    """Where a codec's random numbers come from, apart from all that stages draw.

    Args:
        place: that made the message; micro-batches are those of all replicas. leaf: number of the tensor in it.
    """
    if not codec.draws:
        return None
    step, micro_batch, stage = place
    apart = place_seed(seed, (step, micro_batch, (1 + is_back) * stages + stage))
    return torch.Generator().manual_seed(place_seed(apart, (leaf, 0, 0)))


def at_eval(edge: Edge, step: int) -> Codec | None:
    """What evaluation does to the activations of an edge after so many steps. Where samples are remembered: nothing, as
    one that is met for the first time crosses whole."""
    if edge.forward is None or edge.forward.options.get("at_eval", "same") == "off":
        return None
    named = _read("edge", edge.forward)
    return named.codec if step >= named.warm_up and not named.cache_bytes else None


def codes_of(edges: Sequence[Edge], first_step: int = 0) -> Codes:
    """
    Args:
        edges: by stage. first_step: how many steps were taken before.

    Raises:
        ValueError: no such codec, options that it refuses, or `same` of nothing.
    """
    found: dict[tuple[str, int], EdgeCode] = {}
    for stage, edge in enumerate(edges):
        there = None if edge.forward is None else _read("edge", edge.forward)
        is_same = edge.back == SAME
        if is_same and there is None:
            raise ValueError(f"edge_back: {SAME} of stage {stage}, whose edge is not coded; name the edge's codec too")
        back = there if is_same else (None if edge.back is None else _read("edge_back", edge.back))
        by_place = is_same and there is not None and there.codec.places is not None and not there.cache_bytes
        if there is not None:
            rest = max(0, there.warm_up - first_step)
            found["activation", stage] = EdgeCode(there.codec, rest, leads=by_place, cache_bytes=there.cache_bytes)
        elif back is not None:
            found["activation", stage] = EdgeCode(back.codec, NEVER)
        if back is not None:
            rest = max(0, back.warm_up - first_step)
            found["activation gradient", stage + 1] = EdgeCode(back.codec, rest, follows=by_place)
    return found


class Remembered(NamedTuple):
    """By which codec changes are written, and what each end may hold of every tensor; 0 bytes: nothing is remembered,
    and the codec writes the values themselves."""

    codec: Choice
    cache_bytes: int


def sample_keys(micro_batch: Any) -> tuple[bytes, ...]:
    """One a sample: along the first dimension of what the first stage reads.

    Raises:
        ValueError: its tensors have no first dimension in common.
    """
    leaves = [leaf for leaf in tree_flatten(micro_batch)[0] if isinstance(leaf, Tensor)]
    counts = {len(leaf) if leaf.dim() else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(
            f"edge: samples are told apart along the first dimension of what the first stage reads, and its tensors "
            f"have shapes {shapes}; want the same number of samples in all, or an edge that remembers none"
        )
    hashes = [blake2b(digest_size=KEY_BYTES) for _ in range(counts.pop())]
    for leaf in leaves:
        rows = leaf.detach().cpu().contiguous().reshape(len(leaf), -1).view(torch.uint8).numpy()
        for one, row in zip(hashes, rows, strict=True):
            one.update(row.tobytes())
    return tuple(one.digest() for one in hashes)


# What an edge may be besides a codec, by name: ("edge" or "edge_back", choice, its options, which it may take) -> by
# what it is coded.
EDGES: Registry[Callable[[str, Choice, dict[str, Any]], Remembered]] = Registry("edge method", "armillary.schedules")


class _Named(NamedTuple):
    """What a choice says of an edge: the codec, in how many steps it rests, what its ends hold of samples."""

    codec: Codec
    warm_up: int
    cache_bytes: int = 0


def _read(what: str, choice: Choice) -> _Named:
    own = {"warm_up": 0, "at_eval": EVALS[0]}
    options: dict[str, Any] = {**own, **choice.options}
    warm_up, eval_ = options.pop("warm_up"), options.pop("at_eval")
    if isinstance(warm_up, bool) or not isinstance(warm_up, int) or warm_up < 0:
        raise ValueError(f"{what}: warm_up is a number of steps, 0 or more, got {warm_up!r}")
    if eval_ not in EVALS or (what == "edge_back" and "at_eval" in choice.options):
        raise ValueError(f"{what}: at_eval is {' or '.join(EVALS)}, and of an edge, not of its way back; got {eval_!r}")
    inner, cache_bytes = Choice(choice.name, options), 0
    if choice.name in EDGES:
        made: Any = EDGES[choice.name](what, choice, options)
        if not isinstance(made, Remembered):
            raise ValueError(f"{what} {choice}: {choice.name} gives {type(made).__name__}; want a Remembered")
        inner, cache_bytes = made
    try:
        return _Named(guarded(codec_of(inner)), warm_up, cache_bytes)
    except ValueError as error:
        raise ValueError(f"{what} {choice}: {error}") from error


def refuse_edges(edges: Sequence[Edge], schedule: Schedule, ranks: Sequence[Sequence[int]], why_none: str) -> None:
    """
    Args:
        ranks: by stage, the processes that run it.
        why_none: what speaks against coded edges under this schedule at all; empty: nothing.

    Raises:
        ValueError: an edge where nothing crosses, or where it cannot be coded; the message says why.
    """
    named = [stage for stage, edge in enumerate(edges) if edge != Edge()]
    if not named:
        return
    if why_none:
        raise ValueError(
            f"schedule: {schedule.name} has no edges to code: {why_none}. Drop edge and edge_back, or take a pipeline "
            f"(whose stages stay with a process)"
        )
    last = schedule.stages - 1
    for stage in named:
        if stage >= last:
            raise ValueError(
                f"edge: stage {stage} hands nothing on: there are stages 0 to {last}, and edges behind "
                f"{f'stages 0 to {last - 1}' if last else 'none of them'}; name one of those, or more stages"
            )
        if ranks[stage] == ranks[stage + 1]:
            raise ValueError(
                f"edge: stages {stage} and {stage + 1} are on one process, so nothing crosses between them; name other "
                f"stages"
            )
        if edges[stage].back is not None and stage in schedule.uncoupled:
            raise ValueError(
                f"edge_back: stage {stage} learns from a loss of its own, and no gradient comes back to it; drop its "
                f"edge_back"
            )
    remembered = [j for (what, j), code in codes_of(edges).items() if what == "activation" and code.cache_bytes]
    for stage in (j for j in remembered if len(ranks[j]) > 1):
        raise ValueError(
            f"edge: samples of stage {stage} come to other processes from step to step, so none has seen them before; "
            f"name the codec of its changes alone"
        )
