"""What runs when, with weights of which age: method.py is the contract, then one file a schedule.

What the file of a schedule, or of a correction of stale weights, imports stands here.
"""

from armillary.schedules.clipping import NORMS, Clip
from armillary.schedules.corrections.correction import (
    CORRECTIONS,
    Correction,
    build_correction,
    register_correction,
    stale_share,
)
from armillary.schedules.edges import Edge, codes_of
from armillary.schedules.in_pipeline import pipeline_method
from armillary.schedules.method import Method, Planned, ScheduleOptions, StageLoad
from armillary.schedules.registry import SCHEDULES, options_of, owns_loop, read
from armillary.schedules.schedule import Action, Kind, Row, Schedule, Staleness, one_pass

__all__ = [
    "CORRECTIONS",
    "NORMS",
    "SCHEDULES",
    "Action",
    "Clip",
    "Correction",
    "Edge",
    "Kind",
    "Method",
    "Planned",
    "Row",
    "Schedule",
    "ScheduleOptions",
    "StageLoad",
    "Staleness",
    "build_correction",
    "codes_of",
    "one_pass",
    "options_of",
    "owns_loop",
    "pipeline_method",
    "read",
    "register_correction",
    "stale_share",
]
