"""Puts what was saved into a run whose schedule owns the loop: model and optimizer become plain, take it in, and the
engine is built anew on the same connections."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.runtime.checkpointing.optimizer_state import by_index, by_name
from armillary.runtime.checkpointing.row_file import StoredRows
from armillary.runtime.checkpointing.saved import SavedState, open_saved, read_rows
from armillary.runtime.first_error import FirstError
from armillary.runtime.hybrid.optimizers import kind_of
from armillary.session.engines.owned_loop import OwnedLoop
from armillary.session.exchange_state import fill_ranks
from armillary.session.load import HALF, fill_averages, is_nothing, take_profile

__all__ = ["reload"]


def reload(run: OwnedLoop, path: str | Path | None) -> dict[str, Any]:
    """Collective, between two steps; see `load`. What the user changed since the run began is as it was meanwhile."""
    with run.taken.as_it_was():
        return _reload(run, path)


def _reload(run: OwnedLoop, path: str | Path | None) -> dict[str, Any]:
    transport, trouble = run.transport, FirstError("load")
    if is_nothing(path, transport):
        return {}
    assert path is not None
    saved: SavedState | None = None
    with trouble.kept():
        saved = open_saved(Path(path), run.rank, run.workers)
        trouble.about = saved.name
        _refuse_misfit(run, saved)
    trouble.agree(transport)
    assert saved is not None
    digests = transport.share(saved.digest)
    if len(set(digests)) > 1:
        names = transport.share(saved.name)
        listing = "; ".join(f"rank {rank}: {names[rank]}, {digest}" for rank, digest in enumerate(digests))
        raise ValueError(f"load: ranks opened different things ({listing}); give all of them the same path")
    run.undo(gather=True)
    run.losses()  # of steps that are behind the training which is loaded now: nobody is told
    with trouble.kept(), torch.no_grad():
        _fill(run, saved)
        fill_averages(run, saved, trouble)
    trouble.agree(transport, HALF)
    transport.step = saved.step
    take_profile(run, saved)
    run.begin()
    with torch.no_grad():
        fill_ranks(run, saved, trouble)
    trouble.agree(transport, HALF)
    if not saved.loops:
        return {}
    return saved.loops[run.rank if run.rank < len(saved.loops) else 0]


def _refuse_misfit(run: OwnedLoop, saved: SavedState) -> None:
    mine = run.model.state_dict()
    missing, extra = sorted(mine.keys() - saved.model.keys()), sorted(saved.model.keys() - mine.keys())
    if missing or extra:
        raise ValueError(
            f"it was saved from another model: it misses {missing or 'nothing'} and has {extra or 'nothing'} besides"
        )
    kind = kind_of(run.optimizer)
    if saved.optimizer_class not in ("", kind):
        raise ValueError(
            f"it was saved from {saved.optimizer_class}, this run has {kind}; use the same optimizer class"
        )
    buffers = {name: buffer.shape for name, buffer in run.model.named_buffers()}
    for name, original in {**buffers, **run.shapes}.items():
        if name in saved.model and tuple(saved.model[name].shape) != tuple(original):
            raise ValueError(
                f"{name!r} was saved with shape {tuple(saved.model[name].shape)}, the model has {tuple(original)}"
            )
    if saved.optimizer is not None:
        by_index(_named(run, saved.optimizer, saved.is_numbered), run.names, run.optimizer)


def _named(run: OwnedLoop, optimizer: Mapping[str, Any], is_numbered: bool) -> Mapping[str, Any]:
    return by_name(optimizer, run.names) if is_numbered else optimizer


def _fill(run: OwnedLoop, saved: SavedState) -> None:
    run.model.load_state_dict({key: _whole(value) for key, value in saved.model.items()})
    if saved.optimizer is None:
        return
    named = _named(run, saved.optimizer, saved.is_numbered)
    state = {
        name: {entry: _whole(value) for entry, value in entries.items()} for name, entries in named["state"].items()
    }
    run.optimizer.load_state_dict(by_index({**named, "state": state}, run.names, run.optimizer))


def _whole(value: Any) -> Any:
    if isinstance(value, StoredRows):
        return read_rows(value, 0, value.shape[0]).clone()
    return value.clone() if isinstance(value, Tensor) else value  # it may be mapped from the file
