"""The names users import, each from where it lives."""

from armillary.facts.plan import Choice, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Link, Topology
from armillary.planning.planner import plan
from armillary.runtime.checkpointing.checkpoint import latest_checkpoint
from armillary.runtime.profiling.profiler import profile
from armillary.session.attach import attach
from armillary.session.check import check
from armillary.session.coded_sum import coded_sum
from armillary.session.decide import assumptions_of
from armillary.session.every import CheckpointEvery
from armillary.session.foresight.simulate import simulate
from armillary.session.foresight.twin import twin
from armillary.session.parallelize import auto_plan, measure, parallelize
from armillary.session.run import Run
from armillary.session.verify_script import verify

__all__ = [
    "CheckpointEvery",
    "Choice",
    "Link",
    "Plan",
    "Profile",
    "Run",
    "Topology",
    "assumptions_of",
    "attach",
    "auto_plan",
    "check",
    "coded_sum",
    "latest_checkpoint",
    "measure",
    "parallelize",
    "plan",
    "profile",
    "simulate",
    "twin",
    "verify",
]
