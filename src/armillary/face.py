"""The names users import, each from where it lives."""

from armillary.checkpoint.folder import latest_checkpoint
from armillary.contracts.schedule import check
from armillary.planning.planner import plan
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice
from armillary.plans.topology import Link, Topology
from armillary.profiler.profiler import profile
from armillary.session.advise import advise
from armillary.session.attach import attach
from armillary.session.coded_sum import coded_sum
from armillary.session.parallelize import auto_plan, measure, parallelize
from armillary.session.plan_job import assumptions_of
from armillary.session.run import Run
from armillary.session.save import CheckpointEvery
from armillary.session.simulate import simulate
from armillary.session.twin import twin
from armillary.session.verify import verify

__all__ = [
    "CheckpointEvery",
    "Choice",
    "Link",
    "Plan",
    "Profile",
    "Run",
    "Topology",
    "advise",
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
