"""Data parallelism one step late: a step begins while the gradients of the last one are being reduced.

The rule of cyclic data parallelism with slack >= N, by a collective instead of a ring: its honest rival. The model is
not cut, so every model and every loss will do. Plain data parallelism is exact and hides what it sends behind its
backward only; the ring is at most as late. The notes say which of them is better, with the numbers.

Source: Pipe-SGD (Li et al., 2018) with width two; delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from armillary.plans.mesh import DATA
from armillary.plans.units import bytes_text, seconds_text
from armillary.schedules.costs import Planned, sent_by_workers
from armillary.schedules.cyclic import cyclic
from armillary.schedules.method import Method, OptionRules, Placing
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.ring import DOMINATED_WORKERS
from armillary.schedules.schedule import Schedule, one_pass

__all__ = ["delayed_all_reduce"]


def delayed_all_reduce(workers: int, stages: int = 1) -> Schedule:
    """All workers at the same tick, all weights one step old."""
    rows = tuple(one_pass(worker, stages, start=0) for worker in range(workers))
    return Schedule("delayed_all_reduce", 2 * stages, rows, ((1,) * stages,) * workers)


def _notes(planned: Planned) -> list[str]:
    notes = ["NOT exact: every gradient is taken at weights one step old, and applied one step after it was made"]
    if planned.workers == 1:
        return [*notes, "one worker has nobody to wait for: schedule simultaneous is exact, and as fast"]
    return [*notes, _beside_plain(planned), _beside_ring(planned)]


def _beside_plain(planned: Planned) -> str:
    needed, backward = planned.exchange_seconds, planned.backward_seconds
    compute = backward + planned.forward_seconds
    late, plain = max(0.0, needed - compute), max(0.0, needed - backward)
    figures = (
        f"exchange and update take {seconds_text(needed)} a step. Here they have the whole step to hide behind, "
        f"{seconds_text(compute)}: {seconds_text(late)} at least remain; plain data parallelism, exact, has its "
        f"backward, {seconds_text(backward)}: {seconds_text(plain)} at least remain"
    )
    return figures if plain > late else f"{figures}. It has room enough, then, and is the better plan"


def _beside_ring(planned: Planned) -> str:
    """The ring of as many equal stages as workers, at slack 0, whatever the model can be cut into."""
    workers, reduced = planned.workers, planned.exchange_bytes
    ring, weights = cyclic(workers), reduced * workers / (2 * (workers - 1))
    sent = [0.0] * workers
    for one in sent_by_workers(ring):
        sent[one.sender] += one.times * weights / workers
    figures = (
        f"sent per worker and step: {bytes_text(reduced)} here; {bytes_text(sum(sent) / workers)} round a cyclic ring "
        f"of {workers} equal stages, {bytes_text(max(sent))} by its busiest worker, where {ring.stale_share:.0%} of "
        f"the pairs of micro-batch and stage read weights one step old, not all"
    )
    if workers in DOMINATED_WORKERS and max(sent) > reduced:
        return f"{figures}. With {workers} workers this is the better plan where bandwidth is what costs"
    return f"{figures}. With {workers} workers the ring is the better plan, where it can be cut into equal stages"


SCHEDULES.register(
    "delayed_all_reduce",
    Method(
        table=lambda options: delayed_all_reduce(workers=1),
        options=OptionRules(frozenset({"clip_norm", "bucket_bytes"})),
        placement=Placing(DATA),
        is_cut=False,
        replicates_table=True,
        notes=_notes,
    ),
)
