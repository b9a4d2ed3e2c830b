"""What every rank runs: one heat of a case, at one rate of the links; `run.py` starts it inside a lab.

A contender is built for its turn and dropped after it, so it begins where all others began and two models need never
fit at once. Rank 0 keeps what was found, as JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measuring.measure import Built, Factory, interleave, one_at_a_time, rehearse
from benchmarks.measuring.record import Record, machine
from benchmarks.netlab.asking import ask
from benchmarks.peers import planning, truth
from benchmarks.peers.case import Case
from benchmarks.peers.catalogue import Contender, contenders, missing
from benchmarks.peers.heats import Entry, Heat, entries

BEGUN = time.perf_counter()


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    entry, everyone = entries()[options.case].for_rounds(options.rounds).only(options.heat), contenders()
    workers = dist.get_world_size()
    if dist.get_rank() == 0:
        entry.prepare(options.folder)
    dist.barrier()
    _rehearse(entry, everyone, options)
    mbit: float = options.mbit
    _ask_for(mbit, options.folder)
    planning.forget()
    case = entry.case(mbit, workers, options.folder, False)
    true = truth.losses(case, workers, entry.most_steps) if dist.get_rank() == 0 else []
    refused = _refused(case, options)
    records = [asdict(_heat(case, heat, mbit, everyone)) for heat in entry.without(refused)]
    if dist.get_rank() == 0:
        found = {
            "case": options.case, "Mbit/s": mbit, "unit": case.unit, "samples": case.samples, "truth": true,
            "refused": refused, "heats": records,
        }  # fmt: skip
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a dozen gloo groups of several frameworks: once, taking them down one by one did not end


def _refused(case: Case, options: argparse.Namespace) -> dict[str, str]:
    asked = options.only.split(",") if options.only else list(contenders())
    unasked = [name for name in contenders() if name not in asked]
    return {**missing(), **dict.fromkeys(unasked, "not asked for"), **case.refused}


def _rehearse(entry: Entry, everyone: Mapping[str, Contender], options: argparse.Namespace) -> None:
    """Two steps of everyone at a small size: what a process needs once is put down to nobody."""
    workers = dist.get_world_size()
    small = entry.case(0, workers, options.folder, True)
    refused = _refused(entry.case(options.mbit, workers, options.folder, False), options)
    for name in dict.fromkeys(name for heat in entry.without(refused) for name in heat.names):
        planning.forget()
        _say(f"rehearsing {name}")
        with everyone[name].around():
            rehearse({name: partial(everyone[name].program, small)})


def _heat(case: Case, heat: Heat, mbit: float, everyone: Mapping[str, Contender]) -> Record:
    factories: dict[str, Factory] = {name: partial(everyone[name].program, case) for name in heat.names}

    @contextmanager
    def lend(name: str) -> Iterator[Built]:
        with everyone[name].around(), one_at_a_time({name: factories[name]})(name) as built:
            begun = time.perf_counter()
            yield built
            _say(f"{case.name}, {mbit:g} Mbit/s, {name}: {time.perf_counter() - begun:.1f} s")

    blocks = interleave(factories, heat.rounds, lend)
    conditions = {
        "case": case.name, "workers": dist.get_world_size(), "Mbit/s": mbit, "batch": f"{case.samples:g} {case.unit}",
        "rounds": heat.rounds.rounds, "warm steps": heat.rounds.warm_steps, "timed steps": heat.rounds.timed_steps,
        "machine": machine(),
    }  # fmt: skip
    return Record(conditions, blocks)


def _ask_for(mbit: float, folder: Path) -> None:
    """Waits until the links have this speed."""
    dist.barrier()
    if dist.get_rank() == 0:
        ask(mbit, folder / "shaped")
    dist.barrier()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"peers: {time.perf_counter() - BEGUN:5.0f} s: {text}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--heat", type=int, required=True, help="of the case, counted from 0")
    parser.add_argument("--only", default="", help="contenders, parted by commas; the rest is left out")
    parser.add_argument("--rounds", type=int, default=0, help="at most so many a heat; 0 is the case's own")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
