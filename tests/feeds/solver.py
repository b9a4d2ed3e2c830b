"""A user's solver: NumPy and a Writer, with torch barred. Every number of a snapshot is told by its step and rank.

usage: python solver.py '{"store": ..., "steps": 10, ...}'
"""

import json
import sys
import time

if __name__ == "__main__":
    sys.modules["torch"] = None  # a solver's machine has none

import numpy as np

from armillary.feeds.writer import Writer


def snapshot(step, rank, shape=(3, 4)):
    u = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * step + 100 * rank
    return {"u": u, "p": np.full(2, step + rank / 8), "step": np.int64(step)}


def main(told):
    steps, pause, rank = told.pop("steps"), told.pop("pause", 0.0), told.get("rank", 0)
    asks, told_first = told.pop("asks", False), told.pop("first", 0)
    shape = tuple(told.pop("shape", (3, 4)))
    with Writer(told.pop("store"), **told) as w:
        print("begun", flush=True)
        for step in range(told_first, told_first + steps):
            w.put(step, snapshot(step, rank, shape))
            if w.stop_asked():
                print("stopped", step)
                break
            if asks:
                answer = w.ask({"u": snapshot(step, rank, shape)["u"]})
                assert np.array_equal(answer, 2 * snapshot(step, rank, shape)["u"])
            time.sleep(pause)
        print("dropped", w.dropped)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
