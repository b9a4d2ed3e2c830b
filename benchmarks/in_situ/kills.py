"""Kills a writer, its reader, the server of answers or Redis at random moments, and counts what came of it.

The writer logs a step when its `put` has returned. The reader keeps a list of its own of what it trained on, saved with
the stream's state, and looks at every number. So what is torn, twice or lost is found without asking the stream.
"""

import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from armillary import feeds
from benchmarks.in_situ.stores import Valkey, folder, numbers

NUMBERS, PATIENCE_SECONDS, BATCH, SAVE_EVERY = 4096, 20.0, 4, 5
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Place:
    """Where a trial's programs meet, and where they leave their notes."""

    store: str
    home: Path

    def note(self, name: str, text: str) -> None:
        """A line, which a kill leaves whole."""
        file = os.open(self.home / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{text}\n".encode())
        os.close(file)

    def notes(self, name: str) -> list[str]:
        path = self.home / name
        return path.read_text().splitlines() if path.exists() else []


class Doubles(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2 * batch["u"]


def solve(place: Place) -> None:
    """Goes on after the last step of the life before."""
    with feeds.Writer(place.store, keep=8, run="kills", patience=PATIENCE_SECONDS) as writer:
        while not writer.stop_asked():
            step = writer.last_step + 1
            u = numbers(step, NUMBERS)
            writer.put(step, {"u": u})
            place.note("put", str(step))
            if step % 4 == 0:
                try:
                    place.note("answers", "right" if np.array_equal(writer.ask({"u": u}), 2 * u) else "wrong")
                except RuntimeError as error:  # nobody serves just now, or the server died
                    place.note("answers", f"none: {error}")
            time.sleep(0.001)


def serve(place: Place) -> None:
    with feeds.serve(place.store, Doubles(), patience=PATIENCE_SECONDS):
        time.sleep(3600)


def train(place: Place) -> None:
    """Goes on from the state that was saved last; ends when the supervisor says so and the stream has ended."""
    stream = feeds.Stream(place.store, window=feeds.AllOnce(), batch=BATCH, patience=PATIENCE_SECONDS)
    trained: list[list[int]] = []
    saved = place.home / "state.pt"
    if saved.exists():
        state = torch.load(saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lost ones are counted below
            stream.load_state_dict(state["stream"])
        trained = state["trained"]
    place.note("lost", str(stream.lost))
    have = {step for step, _ in trained}
    batches = 0
    while True:
        try:
            for batch in stream:
                for (step, rank, _), u in zip(stream.ids, batch["u"], strict=True):
                    if not np.array_equal(u.numpy(), numbers(step, NUMBERS)):
                        place.note("torn", str(step))
                    if step in have:
                        place.note("twice", str(step))
                    have.add(step)
                    trained.append([step, rank])
                place.note("batches", str(len(trained)))
                batches += 1
                if batches % SAVE_EVERY == 0:
                    _save(saved, stream, trained)
                if (place.home / "end").exists():
                    stream.ask_to_stop()
            break
        except RuntimeError as error:  # the writer died, and will come back
            if "died before it ended" not in str(error):
                place.note("torn", str(error))
            time.sleep(0.02)
    _save(saved, stream, trained)
    place.note("done", "1")


def _save(path: Path, stream: feeds.Stream, trained: list[list[int]]) -> None:
    torch.save({"stream": stream.state_dict(), "trained": trained}, f"{path}.new")
    os.replace(f"{path}.new", path)


ROLES = {"writer": solve, "reader": train, "server": serve}


def _quiet(role: str, place: Place) -> None:
    torch.set_num_threads(1)
    try:
        ROLES[role](place)
    except TimeoutError as error:
        place.note("hangs", f"{role}: {error}")
    except Exception as error:
        place.note("errors", f"{role}: {type(error).__name__}: {error}")


def trial(place: Place, kills: int, draw: random.Random, redis: Valkey | None = None) -> dict[str, Any]:
    """So many kills on one store; what was found."""
    alive = {role: _started(role, place) for role in ROLES}
    victims = [*ROLES, *(["redis"] if redis else [])]
    killed = dict.fromkeys(victims, 0)
    for _ in range(kills):
        time.sleep(draw.uniform(0.02, 0.4))
        victim = draw.choice(victims)
        killed[victim] += 1
        if victim == "redis" and redis:
            redis.kill()
            time.sleep(draw.uniform(0.0, 0.1))
            redis.start()
        else:
            alive[victim].kill()
            alive[victim].join()
            time.sleep(draw.uniform(0.0, 0.1))
        for role, process in alive.items():
            if not process.is_alive():
                alive[role] = _started(role, place)
        _moves_on(place)
    (place.home / "end").touch()
    until = time.monotonic() + 3 * PATIENCE_SECONDS
    while time.monotonic() < until and not place.notes("done"):
        time.sleep(0.05)
        for role in ("writer", "reader"):  # one that was killed while it ended
            if not alive[role].is_alive() and not place.notes("done") and alive[role].exitcode:
                alive[role] = _started(role, place)
    if not place.notes("done"):
        place.note("hangs", "the end")
    for process in alive.values():
        process.kill()
        process.join()
    return _found(place, killed)


def _started(role: str, place: Place) -> Any:
    process = FORK.Process(target=_quiet, args=(role, place), daemon=True)
    process.start()
    return process


def _moves_on(place: Place) -> None:
    """Waits until the reader has had a batch more; a hang if it has none within patience."""
    before, until = len(place.notes("batches")), time.monotonic() + 2 * PATIENCE_SECONDS
    while len(place.notes("batches")) <= before:
        if time.monotonic() > until:
            place.note("hangs", "no batch after a kill")
            return
        time.sleep(0.01)


def _found(place: Place, killed: Mapping[str, int]) -> dict[str, Any]:
    put = {int(step) for step in place.notes("put")}
    trained = {step for step, _ in torch.load(place.home / "state.pt")["trained"]}
    answers = place.notes("answers")
    return {
        "killed": dict(killed),
        "put": len(put),
        "trained": len(trained),
        "torn": len(place.notes("torn")),
        "twice": len(place.notes("twice")),
        "hangs": place.notes("hangs"),
        "errors": place.notes("errors"),
        "missing": len(put - trained),
        "told lost": sum(map(int, place.notes("lost"))),
        "answers": {"right": answers.count("right"), "wrong": answers.count("wrong"),
                    "refused at once": sum(one.startswith("none") for one in answers)},
    }  # fmt: skip


def kills(count: int, seed: int) -> dict[str, Any]:
    """Half of them over files, half over a Redis server that keeps what it acknowledged."""
    draw, found = random.Random(seed), {}
    with folder() as home:
        (home / "files").mkdir()
        found["files"] = trial(Place(f"{home}/flow", home / "files"), count // 2, draw)
    with folder() as home:
        (home / "redis").mkdir()
        redis = Valkey(home, "--appendonly", "yes")
        try:
            found["redis"] = trial(Place(redis.url("flow"), home / "redis"), count - count // 2, draw, redis)
        finally:
            redis.kill()
    return found
