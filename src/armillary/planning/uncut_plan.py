"""A plan whose schedule owns the loop but leaves the model whole: buckets, bytes, memory, and what speaks against it.

Source: Pipe-SGD (Li et al., 2018); delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from armillary.facts.layout import layout_of
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Group, Plan
from armillary.planning.buckets import BucketLimits, buckets, default_limits
from armillary.planning.parallax import PLAIN
from armillary.planning.peak import peak_bytes
from armillary.planning.pricing import Case, dense_forecast
from armillary.schedules.method import Planned
from armillary.schedules.notes import notes_on
from armillary.schedules.registry import read

__all__ = ["plan_uncut"]

BUCKET_BYTES = 5 << 20  # nothing waits for a bucket's end within the step, so latency is worth paying less often


def plan_uncut(case: Case, choice: Choice) -> Plan:
    """
    Args:
        choice: a schedule that leaves the model whole, with options if wanted; a bucket is else of 5 MiB, on nccl 25.

    Raises:
        ValueError: an option there is not.
    """
    topology, stages = case.topology, case.profile.stages
    options = read(choice, topology.workers)
    schedule = options.schedule()
    trained = [fact for fact in case.profile.parameters if fact.requires_grad]
    size = options.bucket_bytes or max(BUCKET_BYTES, default_limits(topology.backend).bytes)
    departures = ("stale",) if schedule.stale_share else ()
    groups = tuple(
        _group(place, members, departures, case)
        for place, members in enumerate(buckets(trained, BucketLimits(size, size)))
    )
    forward = sum(stage.forward_seconds for stage in stages)
    backward = sum(stage.backward_seconds for stage in stages)
    planned = Planned(
        options=options,
        schedule=schedule,
        stages=(),
        workers=topology.workers,
        running=case.profile.running,
        exchange_bytes=sum(group.forecast.sent_bytes for group in groups),
        exchange_seconds=sum(group.forecast.seconds for group in groups),
        forward_seconds=forward,
        backward_seconds=backward,
    )
    return Plan(
        mesh=options.mesh(topology.workers),
        groups=groups,
        model_fingerprint=case.profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice(options.name, options.as_options()),
        compute_seconds=forward + backward,
        activation_bytes=peak_bytes(groups, case),
        notes=notes_on(planned),
        priced_with=case.assumptions.as_fields(),
    )


def _group(place: int, members: tuple[ParameterFact, ...], departures: tuple[str, ...], case: Case) -> Group:
    """Gradients are held twice: under way, and being made."""
    names, by = tuple(fact.name for fact in members), PLAIN["replicated"]
    forecast = dense_forecast(members, by, case) + Forecast(memory_bytes=layout_of(members).joined_bytes)
    return Group(
        f"bucket {place}", names, "replicated", by, departures=departures, forecast=forecast, reason="read whole"
    )
