"""Looks at the job it runs in for longer than a start of training does: links, processor, memory, and a model's stages.

Gloo and NCCL are different machines, so a job that has both gets a topology for each. The stages are timed on all
ranks at once, because ranks that share cores share them in training too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.runtime.link_timer import THOROUGH, Effort
from armillary.runtime.measure import measure
from armillary.runtime.profiling.profiler import profile
from armillary.session.at_once import timed_at_once
from armillary.session.decide import open_transport, subject_of
from armillary.session.workload import Workload

__all__ = ["Survey", "survey"]


@dataclass(frozen=True)
class Survey:
    """What was found; topologies by backend, gloo first. profile: of the workload, if one was given."""

    topologies: tuple[Topology, ...]
    profile: Profile | None


def survey(workload: Workload | None, seed: int, told: Callable[[str], None], effort: Effort = THOROUGH) -> Survey:
    """Every rank must call it; all get the same.

    Args:
        told: hears what is being measured, on this rank.
    """
    transport = open_transport()
    place = transport.place
    devices = [torch.device("cpu")]
    if ("world", "cuda") in transport.groups:
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    topologies = tuple(measure(transport, effort, device, told) for device in devices)
    found = None
    if workload is not None:
        told(f"stages of {workload.name}")
        subject = subject_of(workload, seed)
        batches = list(subject.draw(place.workers))
        looked = profile(
            subject.model, batches, subject.loss, workers=place.workers, workers_per_node=place.workers_per_node
        )
        found = timed_at_once(looked, subject.model, lambda: batches[place.rank], subject.loss, transport)
    transport.close()
    return Survey(topologies, found)
