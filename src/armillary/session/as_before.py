"""Under which plan a run goes on: the one it was under, with the profile it was made from, unless another is asked for.

Both stand in the run's folder, as its last checkpoint left them. To profile and price again would take its time, and
could come out otherwise on a busier machine. So do the links; on the same hosts, with the same torch, nothing is
measured again.
"""

from dataclasses import replace

from armillary.exchanges.rank_info import RankInfo
from armillary.facts.plan import SIMULTANEOUS, Plan
from armillary.facts.profile import Profile
from armillary.session.decide import JobRequest, open_transport
from armillary.session.folder import kept_decision
from armillary.session.kept_start import MadeFor, hosts_of, kept_links
from armillary.session.rank_zero import by_rank_zero
from armillary.session.settings import Settings

__all__ = ["as_before"]


def as_before(settings: Settings, wanted: MadeFor) -> Settings:
    """Collective. The settings with plan and profile of the run that is gone on with, and its links if they are these;
    the settings themselves where anything is asked of the plan, or the job is of other workers or nodes.

    Args:
        wanted: what links must have been measured for; hosts apart.

    Raises:
        ValueError: the plan does not fit this job, and one made anew would train by another rule. On every rank.
    """
    if not settings.resume or settings.request != JobRequest():
        return settings
    transport = open_transport()
    kept = by_rank_zero(transport, lambda: kept_decision(settings.folder))
    place, here = transport.place, replace(wanted, hosts=hosts_of(transport))
    links = by_rank_zero(transport, lambda: kept_links(settings.folder, here)) if kept else None
    transport.close()
    if not kept:
        return settings
    plan, profile = Plan.from_json(kept["plan"]), Profile.from_json(kept["profile"])
    if (plan.workers, plan.workers_per_node) != (place.workers, place.workers_per_node):
        _refuse_another_rule(plan, place)
        return settings
    return replace(settings, request=JobRequest(plan=plan, profile=profile, topology=links))


def _refuse_another_rule(plan: Plan, place: RankInfo) -> None:
    """A schedule may clip or read old weights, and codes change what is learned: nobody leaves either by chance."""
    rules = [] if plan.schedule == SIMULTANEOUS else [f"schedule {plan.schedule}"]
    rules += [note for note in plan.notes if note.startswith("NOT exact")]
    if not rules:
        return
    raise ValueError(
        f"resume: the run trained on {plan.workers} workers, {plan.workers_per_node} a node, by a rule of its own "
        f"({'; '.join(rules)}), and its plan does not fit this job of {place.workers}, {place.workers_per_node} a "
        "node; say how it shall go on: --schedule and --exchange as before, or others, or --plan FILE with a plan for "
        "this job (armillary plan --out FILE)"
    )
