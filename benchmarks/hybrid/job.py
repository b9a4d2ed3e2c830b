"""What every rank of the benchmark runs: `run.py` starts it inside a lab."""

import argparse
import os
import sys
from pathlib import Path

import torch

from armillary.runtime.process_group import start_process_group
from benchmarks.hybrid.dense import dense
from benchmarks.hybrid.measure import Rounds, all_alive, interleave, one_at_a_time, rehearse
from benchmarks.hybrid.model import Sizes
from benchmarks.hybrid.ours import ours
from benchmarks.hybrid.peers import peers
from benchmarks.hybrid.record import Record, machine, save

SMALL = Sizes(vocabulary=512, features=8, hidden=8, projection=4, sentences=2, words=4, negatives=16)

FIRST = 6  # steps before any is timed: prefetch learns from the first few what later ones look up


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    start_process_group()
    sizes = Sizes(options.vocabulary, options.features, negatives=options.negatives)
    everything = {**ours(sizes, options.mbit), **peers(sizes), **dense(options.width, 32, options.mbit)}
    small = {**ours(SMALL, options.mbit), **peers(SMALL), **dense(8, 2, options.mbit)}
    names = options.modes.split(",")
    rehearse({name: small[name] for name in names})
    factories = {name: everything[name] for name in names}
    lend = one_at_a_time(factories) if options.one_at_a_time else all_alive(factories)
    rounds = Rounds(options.rounds, 2, options.steps, 0 if options.one_at_a_time else FIRST)
    blocks = interleave(factories, rounds, lend)
    if torch.distributed.get_rank() == 0:
        conditions = {
            "workers": torch.distributed.get_world_size(), "Mbit/s": options.mbit, "V": sizes.vocabulary,
            "D": sizes.features, "batch": f"{sizes.sentences} x {sizes.words}", "negatives": sizes.negatives,
            "rounds": rounds.rounds, "timed steps": rounds.timed_steps, "machine": machine(),
        }  # fmt: skip
        save(Record(conditions, blocks), Path(options.out))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a dozen gloo groups of several modes: once, taking them down one by one did not end


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modes", required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--vocabulary", type=int, default=400_000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--negatives", type=int, default=2048)
    parser.add_argument("--width", type=int, default=32, help="of the vision modes' ResNet-18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
