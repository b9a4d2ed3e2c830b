"""One of two processes: measures, plans every schedule from that, plays it, carries it out; rank 0 writes both seconds.

A block is: attach, steps that fill the schedule, timed steps, close. From the end of the last filling step to that of
the last timed one, on the slower process; so what is timed is the steady state, as the simulator shows it. Blocks go
round by turns, backwards every second time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from armillary import Choice, Plan, assumptions_of, attach, plan
from armillary.cli.find import find
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.runtime.process_group import start_process_group
from armillary.runtime.transport import Transport
from armillary.session.decide import Wishes, decide, first_batches, subject_of
from armillary.session.workload import Workload
from benchmarks.measuring.record import machine

SCHEDULES = (
    "gpipe(micro_batches=4)", "one_f_one_b(micro_batches=4)", "pipeline(micro_batches=4)", "ring", "zero_ring",
)  # fmt: skip
FILLING = 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=json.loads, required=True, help="of the workload vision")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_process_group()
    workload = find("vision", options.sizes)
    subject = subject_of(workload, 0)
    decided = decide(subject, Wishes())
    case = Case(decided.profile, decided.topology, assumptions_of(subject.optimizer))
    plans = {text: _planned(text, case) for text in SCHEDULES}
    transport = Transport()
    found: dict[str, list[float]] = {text: [] for text in SCHEDULES}
    for turn in range(options.rounds):
        for text in SCHEDULES if turn % 2 == 0 else SCHEDULES[::-1]:
            found[text].append(_block(workload, plans[text], options.steps, transport))
    if transport.place.rank == 0:
        rows = {
            text: {"played": _played(plans[text], case), "measured": statistics.median(seconds), "blocks": seconds}
            for text, seconds in found.items()
        }
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    transport.barrier()
    transport.close()


def _planned(text: str, case: Case) -> Plan:
    return plan(case.profile, case.topology, assumptions=case.assumptions, schedule=Choice.parse(text))


def _played(made: Plan, case: Case) -> float | None:
    """Seconds of a step; None of a schedule that the simulator refuses."""
    try:
        return simulate(made, case).step_seconds
    except ValueError:
        return None


def _block(workload: Workload, made: Plan, steps: int, transport: Transport) -> float:
    """Seconds of a step on the slower rank."""
    torch.manual_seed(0)
    model = workload.model()
    batches = first_batches(workload, 4, 1, 0)
    with attach(made, model, workload.optimizer(model.parameters()), loss=workload.loss, example=batches[0]) as run:
        mine = [batches[number % len(batches)] for number in run._engine.micro_batches]
        for _ in range(FILLING):
            run.step(mine)
        began = time.perf_counter()
        for _ in range(steps):
            run.step(mine)
        seconds = (time.perf_counter() - began) / steps
    return transport.agree_largest([seconds])[0]


if __name__ == "__main__":
    main()
