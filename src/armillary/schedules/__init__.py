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
from armillary.schedules.costs import Planned
from armillary.schedules.edges import EDGES, Edge, Remembered, codes_of
from armillary.schedules.in_pipeline import pipeline_method
from armillary.schedules.instructions import Operation, StageMessage, register_operation, saved
from armillary.schedules.method import (
    Method,
    Objectives,
    OptionRules,
    Placing,
    Residencies,
    ScheduleOptions,
    StageLoad,
)
from armillary.schedules.rank_list import Residency
from armillary.schedules.registry import SCHEDULES, options_of, owns_loop, read
from armillary.schedules.schedule import Action, Kind, Row, Schedule, Staleness, one_pass

__all__ = [
    "CORRECTIONS",
    "EDGES",
    "NORMS",
    "SCHEDULES",
    "Action",
    "Clip",
    "Correction",
    "Edge",
    "Kind",
    "Method",
    "Objectives",
    "Operation",
    "OptionRules",
    "Placing",
    "Planned",
    "Remembered",
    "Residencies",
    "Residency",
    "Row",
    "Schedule",
    "ScheduleOptions",
    "StageLoad",
    "StageMessage",
    "Staleness",
    "build_correction",
    "codes_of",
    "one_pass",
    "options_of",
    "owns_loop",
    "pipeline_method",
    "read",
    "register_correction",
    "register_operation",
    "saved",
    "stale_share",
]
