"""What `armillary advise` does: asks every method what it would bring, and prints the page."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from armillary.cli.launch import run_in_workers
from armillary.cli.names import built_in
from armillary.cli.request import AskedAdvice, AskedMachines, AskedWorkload, read_profile
from armillary.cli.resolve import workload_of
from armillary.cli.terminal import as_json, console_here, put, tell
from armillary.plans.topology import Topology
from armillary.plans.units import seconds_text
from armillary.session.advice_page import AdvicePage
from armillary.session.advise import asked_of_all
from armillary.session.asked_methods import Typed, situation_of
from armillary.session.plan_job import model_to_plan
from armillary.session.run_folder import can_draw

__all__ = ["advise_asked"]

WORKERS = 8
BATCHES = 8  # that a script draws


def advise_asked(
    subject: AskedWorkload,
    machines: AskedMachines,
    asked: AskedAdvice,
    imports: Sequence[str],
    seed: int,
    is_json: bool,
) -> NoReturn:
    """Asks, prints, and ends the process."""

    def prepare() -> AdvicePage:
        torch.set_num_threads(1)  # a worker is taken to have one core
        task = workload_of(subject)  # first: it may bring methods of its own
        topology = _topology(machines, asked.memory_bytes)
        profile = None if machines.profile_file is None else read_profile(machines.profile_file)
        tell("profiling the model")
        typed = _typed(subject, imports)
        found = situation_of(model_to_plan(task, seed), topology, profile, typed=typed, measures=asked.measures)
        page = asked_of_all(found, asked.target, [_links(topology, machines)], tell)
        if asked.script:
            page.script(asked.script)  # refuses what there is not
        return page

    def body(page: AdvicePage) -> int:
        if asked.script:
            print(page.script(asked.script))
            return 0
        written = () if asked.out is None or not can_draw(asked.out) else (f"written: {page.save(asked.out)}",)
        if is_json:
            print(as_json(page.facts()))
        else:
            put(console_here(), (*page.page(), *written))
        return 0

    run_in_workers(1, prepare, body)


def _topology(machines: AskedMachines, memory_bytes: int | None) -> Topology:
    topology = machines.topology
    count = machines.workers or (topology.workers if machines.topology_file else WORKERS)
    topology = topology.of(count)
    return topology if memory_bytes is None else replace(topology, memory_bytes=memory_bytes)


def _links(topology: Topology, machines: AskedMachines) -> str:
    """What is said of them on the page."""
    if machines.topology_file is not None:
        return f"links from {machines.topology_file.name}"
    link = topology.link
    speed = f"{link.bytes_per_second * 8 / 1e9:g} Gbit/s and {seconds_text(link.latency_seconds)} a message"
    return f"links of {speed}, alike for every kind of request"


def _typed(subject: AskedWorkload, imports: Sequence[str]) -> Typed:
    """The workload as it stands on lines to type, and as a script makes it."""
    words = [subject.name, *["--small"] * subject.is_small]
    words += [word for option in subject.typed.options for word in ("--set", option)]
    words += ["--corpus", subject.typed.corpus] if subject.typed.corpus else []
    words += ["--data", subject.typed.data] if subject.typed.data else []
    words += [word for name in imports for word in ("--import", name)]
    return Typed(shlex.join(words), _preamble(subject))


def _preamble(subject: AskedWorkload) -> tuple[str, ...]:
    given = ", ".join(f"{name}={value!r}" for name, value in subject.settings.items())
    small = ["**SMALL"] if subject.is_small else []
    names = "SMALL, workload" if small else "workload"
    if subject.name in built_in():
        source = f"from armillary.workloads.{subject.name} import {names}"
    else:
        source = f"from {subject.name.removesuffix('.py').replace('/', '.')} import {names}"
    both = f"workload(**{{**SMALL, {_literal(subject.settings)}}})"
    made = both if small and given else f"workload({', '.join([*small, given]).rstrip(', ')})"
    drawn = f"itertools.islice(task.batches('train', 0, 1, 0), {BATCHES})"
    return (
        "import itertools, torch",
        source,
        f"task, _ = {made}, torch.manual_seed(0)",
        f"model, loss, batches = task.model(), task.loss, [*{drawn}]",
        "optimizer = task.optimizer(model.parameters())",
    )


def _literal(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!r}: {value!r}" for name, value in settings.items())
