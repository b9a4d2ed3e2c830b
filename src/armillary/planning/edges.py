"""Codecs of the edges between stages: what was asked, and what it does to bytes, seconds and memory.

Bytes are those of the codes, with what goes ahead of a code whose length the data decide; of those the forecast is what
the codec's options say. Coding takes the processor of both stages, and hides behind nothing. A code is held until the
gradient has come back, as the activation is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from armillary.codecs.codec import CODECS
from armillary.codecs.edges import GUARD_BYTES
from armillary.facts.choice import Choice
from armillary.facts.profile_table import bytes_text
from armillary.facts.stage import Numbers, StageFact
from armillary.planning.pricing import Case
from armillary.schedules.edge import IN_MEMORY_BYTES, SAME, Edge, EdgeCode, codes_of
from armillary.schedules.method import Method, ScheduleOptions
from armillary.schedules.stage_load import StageLoad

__all__ = ["EdgeRequest", "EdgeRequests", "coding_seconds_of", "loads_with_edges", "notes_on_edges", "sent_over"]

EdgeRequest = Choice | str | Mapping[int, Choice | str] | None  # of all edges, or by the stage below

Passed = StageFact | StageLoad  # which say what they hand on

LENGTH_BYTES = 8  # goes ahead of a code whose length the data decide
FEW_BITS, MANY = 4, 1 << 12  # of a number, in so many of them: a gradient in fewer bits is warned of
WORK_AT_PLACES = 3.0  # numbers read and written per value, to pick out those at places that are known


@dataclass(frozen=True)
class EdgeRequests:
    """
    Raises:
        ValueError: something else than codecs, of all edges or by stage.
    """

    edge: EdgeRequest = None
    edge_back: EdgeRequest = None

    def __post_init__(self) -> None:
        for name, request in (("edge", self.edge), ("edge_back", self.edge_back)):
            asked = request if isinstance(request, Mapping) else {0: request}
            strange = [key for key in asked if isinstance(key, bool) or not isinstance(key, int) or key < 0]
            if strange or any(not isinstance(one, Choice | str | None) for one in asked.values()):
                raise ValueError(
                    f"plan: {name} is {request!r}; want a codec as text or as a Choice, or a mapping from numbers of "
                    "stages to such"
                )

    def __bool__(self) -> bool:
        return bool(self.edge) or bool(self.edge_back)

    def refuse_without_edges(self, schedule: Choice, method: Method) -> None:
        """
        Raises:
            ValueError: something is asked of the edges of a schedule that has none to code.
        """
        if self and method.no_edges:
            raise ValueError(
                f"plan: edge and edge_back code what goes from stage to stage; under {schedule} {method.no_edges}. "
                f"Name a pipeline as the schedule, or drop them (--exchange codes gradients of replicas)"
            )

    def of(self, options: ScheduleOptions) -> ScheduleOptions:
        """The options with every edge as it is asked for.

        Raises:
            ValueError: an edge that there is not, or that cannot be coded so.
        """
        if not self:
            return options
        if options.stages == 1:
            raise ValueError("plan: edge and edge_back are for what goes from stage to stage; there is one stage")
        on, back = _by_stage(self.edge, options.stages), _by_stage(self.edge_back, options.stages)
        last = max(options.stages - 1, *on, *back)
        return replace(options, edges=tuple(Edge(on.get(j), back.get(j)) for j in range(last + 1)))


def _by_stage(request: EdgeRequest, stages: int) -> Mapping[int, Choice]:
    if request is None:
        return {}
    asked = request if isinstance(request, Mapping) else dict.fromkeys(range(stages - 1), request)
    return {stage: CODECS.named(one) for stage, one in asked.items()}


def sent_over(code: EdgeCode | None, below: Passed) -> float:
    """Bytes of a letter, an activation or its gradient.

    Args:
        below: the stage below the edge.
    """
    if code is None or code.rests:
        return below.output_bytes
    raw = sum(one.numel * one.item_bytes for one in below.output_numbers)
    return below.output_bytes - raw + sum(_code_bytes(code, one) for one in below.output_numbers)


def _code_bytes(code: EdgeCode, one: Numbers) -> int:
    places = code.codec.places
    if code.follows and places is not None:
        return LENGTH_BYTES + GUARD_BYTES + places(one.numel) * one.item_bytes
    return (0 if code.is_fixed else LENGTH_BYTES) + code.codec.expected_bytes(*one)


def _refuse_unknown(below: StageLoad) -> None:
    if below.output_bytes and not below.output_numbers:
        raise ValueError(
            f"edge: of what stage {below.first} .. {below.last} hands on, the profile knows no floating numbers in two "
            f"dimensions or more that ask for a gradient, which a codec could write; drop its edge, or profile again"
        )


def coding_seconds_of(code: EdgeCode | None, below: Passed, case: Case) -> float:
    """Of one side of one letter: encoding or decoding."""
    if code is None or code.rests:
        return 0.0
    work = WORK_AT_PLACES if code.follows else code.codec.work
    raw = sum(one.numel * one.item_bytes for one in below.output_numbers)
    return raw * work / 2 / case.assumptions.memory_bytes_per_second


def loads_with_edges(loads: Sequence[StageLoad], options: ScheduleOptions, case: Case) -> tuple[StageLoad, ...]:
    """Stages with the seconds of their coding, and with the codes that they hold."""
    codes, found = codes_of(options.edges), list(loads)
    for below, above in ((j, j + 1) for j in range(len(loads) - 1)):
        ways = (("activation", below), ("activation gradient", above))
        if codes.keys() & set(ways):
            _refuse_unknown(loads[below])
        for way in ways:
            seconds = coding_seconds_of(codes.get(way), loads[below], case)
            for j in (below, above):
                found[j] = replace(found[j], seconds=found[j].seconds + seconds)
        for j, way in zip((below, above), ways, strict=True):
            held = 0 if way not in codes or codes[way].rests else sent_over(codes[way], loads[below])
            found[j] = replace(found[j], activation_bytes=found[j].activation_bytes + round(held))
        if ways[0] in codes and codes[ways[0]].cache_bytes <= IN_MEMORY_BYTES:
            for j in (below, above):
                held = codes[ways[0]].cache_bytes * len(loads[below].output_numbers)
                found[j] = replace(found[j], cache_bytes=found[j].cache_bytes + held)
        if ways[0] in codes and codes[ways[0]].leads:
            bits = sum(one.numel for one in loads[below].output_numbers)
            for j in (below, above):
                found[j] = replace(found[j], activation_bytes=found[j].activation_bytes + -(-bits // 8))
    return tuple(found)


def notes_on_edges(options: ScheduleOptions) -> list[str]:
    """What is lost, and what it costs where it is known to cost."""
    if not options.edges:
        return []
    notes = ["what a code of an edge leaves out is lost: nothing is sent later, as it is of gradients between replicas"]
    remembered = [(what[1], code.cache_bytes) for what, code in codes_of(options.edges).items() if code.cache_bytes]
    for stage, cache_bytes in remembered:
        notes.append(
            f"the edge of stage {stage} remembers samples: bytes are forecast for samples met before; each is sent "
            f"whole the first time, and again after a restart. Each end holds up to {bytes_text(cache_bytes)} of every "
            f"tensor{'' if cache_bytes <= IN_MEMORY_BYTES else ', in a file'}; the oldest go first. A sample that is "
            f"augmented at random is new every time"
        )
    thinned = [
        stage - 1 for (_, stage), code in codes_of(options.edges).items()
        if options.edges[stage - 1].back not in (None, SAME) and code.codec.places is not None
    ]  # fmt: skip
    few = [
        stage - 1 for (what, stage), code in codes_of(options.edges).items()
        if what != "activation" and not code.follows and code.codec.places is None
        and code.codec.expected_bytes(MANY, 4) * 8 < FEW_BITS * MANY
    ]  # fmt: skip
    if few:
        notes.append(
            f"the gradient that comes back to stage {', '.join(map(str, sorted(few)))} has fewer than {FEW_BITS} bits "
            f"a number, and nothing of the rest is sent later: look at the loss (armillary twin), or take more bits"
        )
    if thinned:
        named = ", ".join(map(str, sorted(set(thinned))))
        notes.append(
            f"the gradient that comes back to stage {named} is thinned for itself, which is biased and has been "
            f"seen to hurt (MLSys 2024): edge_back=same sends it in the places of its activation"
        )
    return notes
