"""Under which schedules tables may be kept by row, and why not under the others."""

from collections.abc import Sequence

from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import SCHEDULES

__all__ = ["refuse_rows"]


def refuse_rows(options: ScheduleOptions, names: Sequence[str], workers: int) -> None:
    """
    Raises:
        ValueError: the schedule, clipping or corrections cannot go with row-sharded tables; the message says what can.
    """
    tables = ", ".join(names)
    if not names:
        return
    if not options.method.has_rows:
        several = ", ".join(name for name, method in SCHEDULES.all().items() if method.has_rows)
        raise ValueError(
            f"schedule: {tables} cannot be kept by row under {options.name}: there workers are at stages of their "
            f"own, and a look-up needs all owners at one moment; take {several}, or plan without rows"
        )
    replicas = options.replicas(workers)
    if 1 < replicas < workers:
        raise ValueError(
            f"schedule: {tables} cannot be kept by row on {replicas} replicas of {workers // replicas} processes: rows "
            f"have one owner each, and replicas look them up at times of their own; plan without rows, or take as many "
            f"stages as processes"
        )
    if options.clip is not None:
        raise ValueError(
            f"schedule: clip_norm={options.clip_norm} cannot go with {tables} kept by row: no worker holds the whole "
            f"gradient when its stage is stepped, so nobody knows the norm in time; drop clip_norm, or plan without "
            f"rows"
        )
    if options.corrections:
        raise ValueError(
            f"schedule: {', '.join(options.corrections)} cannot go with {tables} kept by row: it wants momentum or "
            f"last gradients of all rows that a stale micro-batch reads, their owners move the touched rows only; drop "
            f"corrections, or plan without rows"
        )
