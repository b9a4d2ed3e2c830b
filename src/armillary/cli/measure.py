"""What `armillary measure` does: times this cluster's links, processors and a model's stages, into files.

It looks longer than a start of training does. Gloo and NCCL are different machines, so a job that has both gets a
topology for each. Stages are timed on all ranks at once, because ranks that share cores share them in training too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from armillary.cli.launch import rank, run_in_workers
from armillary.cli.request import AskedWorkload
from armillary.cli.resolve import workload_of
from armillary.cli.terminal import as_json, console_here, put
from armillary.measuring.links import THOROUGH, Effort
from armillary.measuring.measure import measure
from armillary.plans.profile import Profile
from armillary.plans.topology import Processor, Topology
from armillary.plans.units import Page, Part, Table, bytes_text, seconds_text
from armillary.profiler.probe import profile_concurrently
from armillary.profiler.profiler import profile
from armillary.session.plan_job import model_to_plan, open_transport
from armillary.session.run_folder import open_folder
from armillary.session.workload import Workload

__all__ = ["Survey", "measure_asked", "survey"]


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
        subject = model_to_plan(workload, seed)
        batches = list(subject.draw(place.workers))
        looked = profile(
            subject.model, batches, subject.loss, workers=place.workers, workers_per_node=place.workers_per_node
        )
        found = profile_concurrently(looked, subject.model, lambda: batches[place.rank], subject.loss, transport)
    transport.close()
    return Survey(topologies, found)


class _Ready(NamedTuple):
    task: Workload | None


def measure_asked(workload: AskedWorkload | None, workers: int | None, seed: int, out: Path, is_json: bool) -> NoReturn:
    """Measures, and ends the process."""

    def prepare() -> _Ready:
        return _Ready(None if workload is None else workload_of(workload))

    def body(ready: _Ready) -> int:
        if rank() > 0:
            survey(ready.task, seed, lambda _: None)
            return 0
        open_folder(out)
        found = survey(ready.task, seed, (lambda _: None) if is_json else _Progress())
        files = _keep(found, out)
        if is_json:
            print(as_json(found))
        else:
            put(console_here(), _page(found, files))
        return 0

    run_in_workers(workers, prepare, body)


class _Progress:
    """Says what was measured as it is measured, beside the tables, which go to stdout."""

    def __init__(self) -> None:
        self.console = console_here(is_aside=True)

    def __call__(self, text: str) -> None:
        self.console.print(f"measured {text}", style="dim")


def _keep(found: Survey, out: Path) -> list[Path]:
    """Writes the files; gloo's topology has the plain name."""
    files = []
    for topology in found.topologies:
        files.append(out / ("topology.json" if topology.backend == "gloo" else f"topology_{topology.backend}.json"))
        topology.save(files[-1])
    if found.profile is not None:
        files.append(out / "profile.json")
        found.profile.save(files[-1])
    return files


def _page(found: Survey, files: list[Path]) -> Page:
    parts: list[Part] = []
    for topology in found.topologies:
        nodes = f"{topology.nodes} node(s) of {topology.workers_per_node}, {topology.backend}"
        memory = f"{bytes_text(topology.memory_bytes)} of memory a worker"
        parts.append(f"{nodes}; {memory}; {topology.hidden_share:.0%} of a request hides behind compute")
        parts.append(_links(topology))
        if topology.processor is not None:
            speed = f"{topology.processor.memory_bytes_per_second / 1e9:.3g} GB/s"
            parts.append(f"index work of a rank, all ranks at once; whole tensors are read and written at {speed}")
            parts.append(_rates(topology.processor))
            parts += [_coding(topology.processor)] if topology.processor.coding else []
    if found.profile is not None:
        parts += found.profile.page()
    return (*parts, f"written: {', '.join(map(str, files))}")


def _links(topology: Topology) -> Table:
    rows = [
        (
            one.request,
            f"{one.side} nodes",
            seconds_text(one.link.latency_seconds),
            f"{one.link.bytes_per_second * 8 / 1e9:.3g}",
            f"{one.residual:.0%}",
        )
        for one in topology.requests
    ]
    return Table(("request", "links", "latency a message", "Gbit/s", "worst residual"), rows, (0, 1))


def _rates(processor: Processor) -> Table:
    rows = []
    for name in ("gather", "merge", "add"):
        rate = getattr(processor, name)
        costs = (_nanoseconds(rate.row_seconds), _nanoseconds(1e3 * rate.byte_seconds))
        many = seconds_text(rate.seconds(10_000, 1e3))
        rows.append((name, seconds_text(rate.call_seconds), *costs, many, f"{rate.residual:.0%}"))
    return Table(("work", "a call", "a row", "a kB of it", "10,000 rows of 1 kB", "worst residual"), rows)


def _coding(processor: Processor) -> Table:
    rows = []
    for one in processor.coding:
        costs = (seconds_text(one.call_seconds), seconds_text(one.million_seconds))
        rows.append((one.exchange, str(one.workers), *costs, f"{one.residual:.0%}"))
    header = ("not exact", "workers", "a call", "a million float32 values", "worst residual")
    return Table(header, rows, (0,))


def _nanoseconds(seconds: float) -> str:
    return f"{seconds * 1e9:.3g} ns"
