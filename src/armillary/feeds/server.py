"""Answers what solvers ask: `serve` runs a model beside the training loop, for whoever calls `Writer.ask`.

Questions that wait are one batch. The model is a copy, so training goes on undisturbed and `reload` says when it takes
newer weights.

Source: the coupled inference of Balin et al. (2023). Departure: the model runs where it is served, in PyTorch, and not
in the database.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from armillary.feeds.folder import ServerFiles
from armillary.feeds.writer import REDIS, Arrays, Snapshot, parts_of, pauses

__all__ = ["Server", "serve"]

Forward = Callable[[nn.Module, dict[str, Tensor]], Tensor | Mapping[str, Tensor]]


def serve(store: str, model: nn.Module, *, forward: Forward | None = None, patience: float = 60.0) -> "Server":
    """Answers `Writer.ask` in this store, from a thread of this process, until it is closed.

        with feeds.serve("/dev/shm/flow", model) as server:
            ...
            server.reload(model.state_dict())

    Args:
        model: it is copied, in evaluation mode. It gets a dict of tensors of shape (questions, *shape of the field),
            and gives a tensor, or a dict of tensors, whose first axis is the questions'.
        forward: `forward(model, batch)`, where the model wants something else than `model(batch)`.
        patience: seconds that a Redis server may be away.

    Raises:
        RuntimeError: another process serves there.
    """
    return Server(store, model, forward or (lambda model, batch: model(batch)), patience)


def _opened(url: str, patience: float) -> Any:
    from armillary.feeds.redis_lists import ServerLists

    return ServerLists(url, patience)


class Server:
    """What `serve` gives; close it, or use it in a `with` block."""

    def __init__(self, store: str, model: nn.Module, forward: Forward, patience: float) -> None:
        self._model, self._forward = copy.deepcopy(model).eval(), forward
        is_redis = urlsplit(store).scheme in REDIS
        self._place = _opened(store, patience) if is_redis else ServerFiles(store)
        self._is_closing, self._loading = threading.Event(), threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"serve {store}", daemon=True)
        self._thread.start()

    def reload(self, state: Mapping[str, Any]) -> None:
        """Takes newer weights, between two batches of questions."""
        with self._loading:
            self._model.load_state_dict(state)

    def _run(self) -> None:
        try:
            pause = pauses(float("inf"))
            while not self._is_closing.is_set():
                if questions := self._place.questions():
                    self._answer(questions)
                    pause = pauses(float("inf"))
                else:
                    next(pause)
        except BaseException as error:
            self._error = error
        finally:
            self._place.close()

    def _answer(self, questions: list[Snapshot]) -> None:
        """Those of the same fields are one batch."""
        alike: dict[Any, list[Snapshot]] = {}
        for one in questions:
            alike.setdefault(one.header.fields, []).append(one)
        for these in alike.values():
            try:
                answers, error = self._answers(these), ""
            except Exception as raised:  # the asker is told
                answers, error = [{}] * len(these), f"{type(raised).__name__}: {raised}"[:1000]
            for one, arrays in zip(these, answers, strict=True):
                id, ranks = one.header.id, one.header.ranks
                self._place.answer(one.header, parts_of(id, ranks, arrays, error=error))

    def _answers(self, questions: list[Snapshot]) -> list[Arrays]:
        names = questions[0].arrays
        batch = {name: torch.stack([torch.from_numpy(one.arrays[name]) for one in questions]) for name in names}
        with self._loading, torch.no_grad():
            found = self._forward(self._model, batch)
        rows = {"": found} if isinstance(found, Tensor) else dict(found)
        for name, one in rows.items():
            if one.ndim < 1 or len(one) != len(questions):
                raise ValueError(
                    f"output {name!r} has shape {[*one.shape]}; want {len(questions)} rows, one a question"
                )
        return [{name: one[at].numpy(force=True) for name, one in rows.items()} for at in range(len(questions))]

    def close(self) -> None:
        """Raises what ended the server before its time."""
        self._is_closing.set()
        self._thread.join()
        if self._error:
            raise self._error

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
