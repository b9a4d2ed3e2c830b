"""What a plan is made of: models, machines, choices, requests, traces. Imports nothing of ours.

Names are imported when they are asked for, since requests and layouts bring torch, and the command line reads plans
without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.plans.advice import ADVICE, Advice, Combination, Situation, advisers, advises, not_for, planned
    from armillary.plans.group import DEPARTURES, EXACT, Forecast, Group, StagePlan
    from armillary.plans.mesh import DATA, STAGE, Axis, Mesh
    from armillary.plans.parcel import Layout, layout_of
    from armillary.plans.plan import SIMULTANEOUS, Plan, model_fingerprint
    from armillary.plans.profile import Numbers, ParameterFact, Profile, Reads, RowFacts, StageFact
    from armillary.plans.registry import Choice, Registry
    from armillary.plans.requests import (
        AllGather,
        AllReduce,
        AllToAll,
        Labelled,
        Message,
        Program,
        Receive,
        Request,
        Scope,
        Send,
        alone,
        members,
        sent_bytes,
        summed,
    )
    from armillary.plans.topology import (
        TURN_BYTES,
        TURN_SECONDS,
        CodingRate,
        Link,
        Processor,
        RequestLink,
        RowRate,
        Topology,
        UpdateRate,
    )
    from armillary.plans.trace import Event, Record, Trace
    from armillary.plans.units import Page, Table, bytes_text, count_text, page_text, seconds_text

__all__ = [
    "ADVICE",
    "DATA",
    "DEPARTURES",
    "EXACT",
    "SIMULTANEOUS",
    "STAGE",
    "TURN_BYTES",
    "TURN_SECONDS",
    "Advice",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Axis",
    "Choice",
    "CodingRate",
    "Combination",
    "Event",
    "Forecast",
    "Group",
    "Labelled",
    "Layout",
    "Link",
    "Mesh",
    "Message",
    "Numbers",
    "Page",
    "ParameterFact",
    "Plan",
    "Processor",
    "Profile",
    "Program",
    "Reads",
    "Receive",
    "Record",
    "Registry",
    "Request",
    "RequestLink",
    "RowFacts",
    "RowRate",
    "Scope",
    "Send",
    "Situation",
    "StageFact",
    "StagePlan",
    "Table",
    "Topology",
    "Trace",
    "UpdateRate",
    "advisers",
    "advises",
    "alone",
    "bytes_text",
    "count_text",
    "layout_of",
    "members",
    "model_fingerprint",
    "not_for",
    "page_text",
    "planned",
    "seconds_text",
    "sent_bytes",
    "summed",
]

_NAMES = {
    "advice": ("ADVICE", "Advice", "Combination", "Situation", "advisers", "advises", "not_for", "planned"),
    "group": ("DEPARTURES", "EXACT", "Forecast", "Group", "StagePlan"),
    "mesh": ("DATA", "STAGE", "Axis", "Mesh"),
    "parcel": ("Layout", "layout_of"),
    "plan": ("SIMULTANEOUS", "Plan", "model_fingerprint"),
    "profile": ("Numbers", "ParameterFact", "Profile", "Reads", "RowFacts", "StageFact"),
    "registry": ("Choice", "Registry"),
    "requests": (
        "AllGather",
        "AllReduce",
        "AllToAll",
        "Labelled",
        "Message",
        "Program",
        "Receive",
        "Request",
        "Scope",
        "Send",
        "alone",
        "members",
        "sent_bytes",
        "summed",
    ),
    "topology": (
        "TURN_BYTES",
        "TURN_SECONDS",
        "CodingRate",
        "Link",
        "Processor",
        "RequestLink",
        "RowRate",
        "Topology",
        "UpdateRate",
    ),
    "trace": ("Event", "Record", "Trace"),
    "units": ("Page", "Table", "bytes_text", "count_text", "page_text", "seconds_text"),
}
_FILES = {name: file for file, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'armillary.plans' has no attribute {name!r}")
    return getattr(import_module(f"armillary.plans.{_FILES[name]}"), name)
