"""A plan whose schedule is a delayed all-reduce: buckets, bytes, memory, the picture, and which rival does better.

Its rivals are plain data parallelism, which is exact and hides what it sends behind its backward only, and the ring of
cyclic data parallelism, which is at most as late. The plan says which of them is better, with the numbers.

Source: Pipe-SGD (Li et al., 2018); delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Group, Plan, model_fingerprint
from armillary.facts.profile_table import bytes_text, seconds_text
from armillary.planning.buckets import BucketLimits, buckets, default_limits
from armillary.planning.pricing import Case, dense_forecast
from armillary.planning.schedule_notes import DOMINATED_WORKERS, running_note
from armillary.schedules.chosen import read_choice
from armillary.schedules.cyclic import cyclic
from armillary.schedules.delayed_all_reduce import BY, DelayedOptions
from armillary.schedules.messages import ring_messages

__all__ = ["plan_delayed"]

BUCKET_BYTES = 5 << 20  # nothing waits for a bucket's end within the step, so latency is worth paying less often


def plan_delayed(case: Case, choice: Choice) -> Plan:
    """
    Args:
        choice: "delayed_all_reduce" with clip_norm and bucket_bytes, if wanted; a bucket is else of 5 MiB, on nccl 25.

    Raises:
        ValueError: an option there is not.
    """
    topology = case.topology
    options = read_choice(choice, topology.workers)
    assert isinstance(options, DelayedOptions), choice
    trained = [fact for fact in case.profile.parameters if fact.requires_grad]
    size = options.bucket_bytes or max(BUCKET_BYTES, default_limits(topology.backend).bytes)
    groups = tuple(
        _group(place, members, case) for place, members in enumerate(buckets(trained, BucketLimits(size, size)))
    )
    return Plan(
        workers=topology.workers,
        groups=groups,
        model_fingerprint=model_fingerprint((fact.name, fact.shape, fact.dtype) for fact in trained),
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice("delayed_all_reduce", options.as_options()),
        compute_seconds=sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages),
        notes=_notes(case, groups),
        picture=str(options.schedule()),
    )


def _group(place: int, members: tuple[ParameterFact, ...], case: Case) -> Group:
    """Behind the gradients travels a used flag per parameter. Gradients are held twice: under way, and being made."""
    item_bytes = members[0].bytes // max(1, members[0].elements)
    nbytes = sum(fact.bytes for fact in members) + item_bytes * len(members)
    names = tuple(fact.name for fact in members)
    forecast = dense_forecast(nbytes, BY, case, facts=members) + Forecast(memory_bytes=nbytes)
    return Group(f"bucket {place}", names, "replicated", BY, "stale", forecast, "read whole")


def _notes(case: Case, groups: tuple[Group, ...]) -> tuple[str, ...]:
    """One sentence each, for the reader of the plan."""
    notes = ["NOT exact: every gradient is taken at weights one step old, and applied one step after it was made"]
    if case.profile.running:
        notes.append(running_note("delayed_all_reduce", case.profile.running))
    if case.topology.workers == 1:
        return (*notes, "one worker has nobody to wait for: schedule simultaneous is exact, and as fast")
    return (*notes, _beside_plain(case, groups), _beside_ring(case.topology.workers, groups))


def _beside_plain(case: Case, groups: tuple[Group, ...]) -> str:
    needed = sum(group.forecast.seconds for group in groups)
    backward = sum(stage.backward_seconds for stage in case.profile.stages)
    compute = backward + sum(stage.forward_seconds for stage in case.profile.stages)
    late, plain = max(0.0, needed - compute), max(0.0, needed - backward)
    figures = (
        f"exchange and update take {seconds_text(needed)} a step. Here they have the whole step to hide behind, "
        f"{seconds_text(compute)}: {seconds_text(late)} at least remain; plain data parallelism, exact, has its "
        f"backward, {seconds_text(backward)}: {seconds_text(plain)} at least remain"
    )
    return figures if plain > late else f"{figures}. It has room enough, then, and is the better plan"


def _beside_ring(workers: int, groups: tuple[Group, ...]) -> str:
    """The ring of as many equal stages as workers, at slack 0, whatever the model can be cut into."""
    ring = cyclic(workers)
    reduced = sum(group.forecast.sent_bytes for group in groups)
    weights = reduced * workers / (2 * (workers - 1))
    sent = [0.0] * workers
    for message in ring_messages(ring):
        sent[message.sender] += weights / workers
    figures = (
        f"sent per worker and step: {bytes_text(reduced)} here; {bytes_text(sum(sent) / workers)} round a cyclic ring "
        f"of {workers} equal stages, {bytes_text(max(sent))} by its busiest worker, where {ring.stale_share:.0%} of "
        f"the pairs of micro-batch and stage read weights one step old, not all"
    )
    if workers in DOMINATED_WORKERS and max(sent) > reduced:
        return f"{figures}. With {workers} workers this is the better plan where bandwidth is what costs"
    return f"{figures}. With {workers} workers the ring is the better plan, where it can be cut into equal stages"
