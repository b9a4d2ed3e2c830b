"""Armillary: plans, runs and checks the training of an ordinary PyTorch model on many workers."""

from armillary.facts.plan import Choice, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.look_ahead import looking_ahead
from armillary.planning.planner import plan
from armillary.runtime.watch.profiler import profile
from armillary.session.attach import attach
from armillary.session.checkpoint import latest, save
from armillary.session.cyclic.drive import drive
from armillary.session.decide import assumptions_of
from armillary.session.every import Every
from armillary.session.export import export
from armillary.session.feed import shard
from armillary.session.load import load
from armillary.session.parallelize import decide, fastest, measure, parallelize
from armillary.session.replan import replan
from armillary.session.verify import verify

__all__ = [
    "Choice",
    "Every",
    "Plan",
    "Profile",
    "Topology",
    "assumptions_of",
    "attach",
    "decide",
    "drive",
    "export",
    "fastest",
    "latest",
    "load",
    "looking_ahead",
    "measure",
    "parallelize",
    "plan",
    "profile",
    "replan",
    "save",
    "shard",
    "verify",
]
