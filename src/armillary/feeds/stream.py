"""Batches of what running writers put: a `Stream` takes snapshots into its window and draws batches from there.

It is an iterable data set, for a loop of one's own, `run.batches(stream)` or `DataLoader(stream, batch_size=None)`.
Each snapshot enters at most once. Everything happens in the thread that asks for a batch.
"""

import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from armillary.feeds.folder import ReaderFiles, Ready, Share
from armillary.feeds.windows import Window, WindowRows
from armillary.feeds.writer import REDIS, Arrays, Field, Header, Id, pauses

__all__ = ["Stream"]

Batch = dict[str, Tensor]
BETWEEN_LOOKS_AT_LOCKS_SECONDS = 0.1


@dataclass(eq=False)
class Stream(IterableDataset[Batch]):
    """Batches of the snapshots that writers put into a store while it is iterated over.

        with Stream("/dev/shm/flow", window=feeds.Reservoir(4096), batch=32, fresh=8) as stream:
            for batch in stream:
                loss(model, batch).backward()

    A batch is a tensor a field, of shape (batch, *shape of the field). The stream ends when every writer has ended and
    nothing is left. After an error it may be iterated over once more, and goes on.

    Args:
        store: as the writers': a folder, or `redis://host:port/name`.
        window: `AllOnce()`, `Latest(n)` or `Reservoir(n)`.
        batch: snapshots of a batch; fewer where the window has fewer, or at the end.
        fresh: so many new snapshots are waited for before each batch (1); 0: a batch waits for none. `AllOnce` takes
            `batch`.
        ordered: snapshots enter by (step, rank), exactly `fresh` a batch once there are enough for one, so that batches
            are a function of snapshots and seed. Every writer is waited for.
        reader: (i, k), this is reader i of k. In a folder it takes the writers r with r % k == i; i and k are
            torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE. In Redis each takes what is there; they are RANK and WORLD_SIZE.
        seed: of the generator that every draw is from.
        patience: seconds without a snapshot after which that is an error.

    Raises:
        ValueError: an argument is not as above, or writers put different fields.
        RuntimeError: another process is this reader, a writer died, or a snapshot is torn.
        TimeoutError: nothing came for `patience` seconds.
    """

    store: str
    _: KW_ONLY
    window: Window
    batch: int
    fresh: int | None = None
    ordered: bool = False
    reader: tuple[int, int] | None = None
    seed: int = 0
    patience: float = 60.0
    ids: tuple[Id, ...] = field(default=(), init=False)  # of the batch that was given last
    lost: int = field(default=0, init=False)  # snapshots that were taken after the state that was loaded

    def __post_init__(self) -> None:
        self.fresh = (1 if self.window.keeps else self.batch) if self.fresh is None else self.fresh
        if self.batch < 1 or self.fresh < 0 or (self.ordered and not self.fresh):
            raise ValueError(
                f"Stream: want batch >= 1, fresh >= 0, 1 if ordered; got batch={self.batch}, fresh={self.fresh}"
            )
        if not self.window.keeps and self.fresh != self.batch:
            raise ValueError(f"Stream: AllOnce takes {self.batch} new snapshots a batch; leave fresh={self.fresh} out")
        is_redis = urlsplit(self.store).scheme in REDIS
        ours = ("RANK", "WORLD_SIZE") if is_redis else ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        told = tuple(int(os.environ[name]) for name in ours if name in os.environ)
        reader = Share(*(self.reader or (told if len(told) == 2 else (0, 1))))
        if not 0 <= reader.reader < reader.readers:
            raise ValueError(f"Stream: want reader=(i, k) with 0 <= i < k, got {(*reader,)}")
        self._share = Share(0, 1) if is_redis and not self.ordered else reader
        self._place = self._opened(reader) if is_redis else ReaderFiles(self.store, self._share)
        self._settings = repr((self.window, self.batch, self.fresh, self.ordered, (*reader,)))
        self._draw = torch.Generator().manual_seed(self.seed)
        self._rows: WindowRows | None = None
        self._seen, self._new = 0, 0  # snapshots that entered: ever, and since the last batch
        self._taken: dict[str, set[int]] = {}  # "run-rank": steps
        self._last: dict[int, int] = {}  # rank: step that was taken last
        self._queue: list[Ready] = []  # of the last look, the next at its end
        self._records: dict[int, Header] = {}
        self._runs: set[str] = set()  # that were seen going on, or taken from; others ended before this stream began
        self._row: int | None = None
        self._came, self._checked = time.monotonic(), 0.0  # when a snapshot came, and when locks were looked at
        self._is_stopping = self._is_uneven_told = False

    def _opened(self, reader: Share) -> Any:
        from armillary.feeds.redis_lists import ReaderLists

        return ReaderLists(self.store, reader, self._share, self.patience)

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise ValueError("Stream: workers of a DataLoader would each take a part; want num_workers=0")
        self._came = time.monotonic()
        while self._gather():
            yield self._drawn()
        self._place.sweep()

    def _gather(self) -> bool:
        """Takes snapshots until a batch is due. False: the stream has ended, and nothing new is in the window."""
        wanted = min(self.batch, self.window.rows(self.batch))
        takes_all = self.window.keeps and not self.ordered  # that is there now, if more than `fresh`
        has_looked, pause = False, pauses(math.inf)
        while True:
            is_due = self._held() >= wanted and self._new >= (self.fresh or 0)
            if is_due and (not takes_all or (has_looked and not self._queue)):
                return True
            if not self._queue:
                self._look()
                has_looked = True
            if self._queue and self._take_next():
                pause = pauses(math.inf)
                continue
            if not self._queue and self._is_ended():
                return self._new > 0 and self._held() > 0
            self._refuse_silence()
            if is_due:
                return True
            self._queue.clear()
            next(pause)

    def _held(self) -> int:
        return len(self._rows.ids) if self._rows else 0

    def _look(self) -> None:
        if self._is_stopping:
            self._place.stop()
        self._records, waiting = self._place.look()
        self._queue = waiting[::-1]
        self._runs |= {record.id.run for record in self._records.values() if not record.is_ended}
        ranks, share = self._place.ranks, self._share
        if not ranks or self._is_uneven_told:
            return
        if ranks <= share.reader:
            raise ValueError(
                f"Stream: reader {share.reader} of {share.readers} has none of {ranks} writers; want fewer readers"
            )
        if ranks % share.readers:
            warnings.warn(f"Stream: {ranks} writers are uneven among {share.readers} readers", stacklevel=4)
        self._is_uneven_told = True

    def _ranks(self) -> list[int]:
        """Writers of this reader."""
        return [rank for rank in range(self._place.ranks) if self._share.has(rank)]

    def _open(self) -> list[int]:
        """Writers of this reader that may still put something."""
        records = {rank: self._records.get(rank) for rank in self._ranks()}
        return [rank for rank, one in records.items() if not (one and one.is_ended and one.id.run in self._runs)]

    def _is_ended(self) -> bool:
        return self._place.ranks > 0 and not self._open()

    def _take_next(self) -> bool:
        """False: it is not its turn yet."""
        waiting = self._queue[-1]
        if self.ordered and not self._is_next(waiting.id):
            return False
        self._queue.pop()
        header = self._place.take(waiting, self._place_for)
        if header is None:
            return True
        self._came = time.monotonic()
        self._last[header.id.rank] = header.id.step
        self._runs.add(header.id.run)
        steps = self._taken.setdefault(f"{header.id.run}-{header.id.rank}", set())
        if header.id.step not in steps:
            steps.add(header.id.step)
            self._seen, self._new = self._seen + 1, self._new + 1
            if self._rows and self._row is not None:
                self._rows.place(self._row, header.id)
        return True

    def _place_for(self, header: Header) -> Arrays | None:
        """Where the window wants its bytes. None: it is not chosen, or was taken before."""
        self._row = None
        if header.id.step in self._taken.get(f"{header.id.run}-{header.id.rank}", ()):
            return None
        self._rows = self._rows or WindowRows(self.window.rows(self.batch), header.fields)
        if self._rows.fields != header.fields:
            raise ValueError(
                f"Stream: writer {header.id.rank} puts {header.fields}; others put {self._rows.fields}; want the same "
                "names, dtypes and shapes of all writers of a store"
            )
        self._row = self.window.row(self._seen, self._held(), self._rows.size, self._draw)
        return None if self._row is None else self._rows.arrays(self._row)

    def _is_next(self, id: Id) -> bool:
        """Whether no writer can put one any more that comes before that."""
        there = {one.id.rank for one in self._queue}
        for rank in self._ranks():
            record = self._records.get(rank)
            if rank not in there and not (record and record.is_ended):
                last = max(record.id.step, self._last.get(rank, -1)) if record else -1
                if record is None or (last + 1, rank) < (id.step, id.rank):
                    return False
        return True

    def _refuse_silence(self) -> None:
        """Raises if a writer is dead that had not ended and left nothing, or if nothing came for too long."""
        now = time.monotonic()
        if now < self._checked + BETWEEN_LOOKS_AT_LOCKS_SECONDS:
            return
        self._checked = now
        dead = [rank for rank, one in self._records.items() if not (one.is_ended or self._place.is_alive(rank))]
        if dead or now > self._came + self.patience:
            self._look()  # what came meanwhile, or was the last word
            if self._is_ended() or (self._queue and not (self.ordered and not self._is_next(self._queue[-1].id))):
                return
            dead = [rank for rank in dead if not self._records[rank].is_ended]
        if dead:
            raise RuntimeError(
                f"Stream: {self._told(dead)} of {self.store} died before it ended; start it again, then iterate again"
            )
        if now > self._came + self.patience:
            who = self._told(self._open()) or "no writer has begun"
            raise TimeoutError(f"Stream: nothing came into {self.store} for {self.patience:g} s: {who}")

    def _told(self, ranks: list[int]) -> str:
        steps = {rank: record.id.step for rank, record in self._records.items() if record.id.step >= 0}
        before = {rank: " of a run that ended before" for rank, record in self._records.items() if record.is_ended}
        return ", ".join(f"writer {rank} (last step {steps.get(rank, 'none')}{before.get(rank, '')})" for rank in ranks)

    def _drawn(self) -> Batch:
        assert self._rows
        at = self.window.drawn(self._held(), self.batch, self._draw)
        self.ids = tuple(self._rows.ids[row] for row in at.tolist())
        batch = self._rows.batch(at)
        self._new = 0
        if not self.window.keeps:
            self._rows.ids.clear()
        return batch

    def ask_to_stop(self) -> None:
        """Writers see it in `stop_asked`, those too that begin later. Go on until the stream ends."""
        self._is_stopping = True
        self._place.stop()

    def state_dict(self, window: bool = True) -> dict[str, Any]:
        """What a stream of the same arguments goes on from, after the batch that was given last.

        Args:
            window: with the snapshots of the window. Without them it begins empty.
        """
        rows = self._rows if window else None
        return {
            "settings": self._settings,
            "taken": {name: torch.tensor(sorted(steps)) for name, steps in self._taken.items()},
            "count": self._place.taken,
            "generator": self._draw.get_state(),
            "entered": [self._seen, self._new],
            "fields": [[*one] for one in rows.fields] if rows else None,
            "ids": [[*id] for id in rows.ids] if rows else [],
            "rows": rows.batch(torch.arange(len(rows.ids))) if rows else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state. What this reader took after it is not in the window again: `lost` says how much.

        Raises:
            ValueError: the state is of a stream of other arguments.
        """
        if state["settings"] != self._settings:
            raise ValueError(f"Stream: the state is of {state['settings']}; want that of {self._settings}")
        self._taken = {name: set(steps.tolist()) for name, steps in state["taken"].items()}
        self._runs = {name.split("-")[0] for name in self._taken}
        self._draw.set_state(state["generator"])
        self._rows, self._seen, self._new = None, 0, 0
        if state["fields"] is not None:
            self._seen, self._new = state["entered"]
            fields = tuple(Field(name, dtype, tuple(shape)) for name, dtype, shape in state["fields"])
            self._rows = WindowRows(self.window.rows(self.batch), fields)
            self._rows.fill([Id(*id) for id in state["ids"]], state["rows"])
        self.lost = max(0, self._place.taken - state["count"])
        if self.lost:
            warnings.warn(f"Stream: {self.lost} snapshots were taken after this state, and are lost", stacklevel=2)

    def close(self) -> None:
        """Another process may be this reader."""
        self._place.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
