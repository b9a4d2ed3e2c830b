"""What one start leaves in a folder for the next: its plan, the links it measured, and what both were made for.

A restart of the same job uses them again and measures nothing, so it begins sooner and under the same plan. Where
anything differs that a plan hangs on, all is measured anew, and rank 0 says what differs.
"""

import json
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.prefetch.batches import leaves
from armillary.session.data_check import entrances
from armillary.session.events import PlannedJob
from armillary.session.run_folder import keep_decision, open_folder
from armillary.tables.optimizers import members
from armillary.transport.agreement import by_rank_zero
from armillary.transport.transport import Transport

__all__ = [
    "BatchShapes",
    "CacheKey",
    "PlanCache",
    "Shapes",
    "cache_key",
    "cached_links",
    "fits",
    "hosts_of",
    "joined",
    "shapes_of",
    "write_cache_key",
]  # fmt: skip

MADE_FOR = "made_for.json"
Shapes = tuple[tuple[int | None, ...], ...]  # of the tensors of a batch; None: it differs from batch to batch
FILES: dict[str, type[Any]] = {"plan.json": Plan, "profile.json": Profile, "topology.json": Topology}
USED = "keep: {}: plan and links are those of an earlier start; nothing is measured"
ANEW = "keep: {}: all is measured anew: {}"
WORDS = {
    "model": "another model", "optimizer": "another optimizer", "torch": "another torch", "machine": "other processors",
    "hosts": "other ranks or hosts", "asked": "other arguments", "batch": "another batch shape",
}  # fmt: skip


@dataclass(frozen=True)
class CacheKey:
    """Everything a plan hangs on that a start can tell. model: its parameters. hosts: of every rank. asked: of the
    plan, in words. batch: empty where no forward was seen."""

    model: str
    optimizer: str
    torch: str
    machine: str
    hosts: tuple[str, ...]
    asked: str
    batch: Shapes = ()

    def why_other(self, kept: "CacheKey") -> str:
        """In words, what is another here than what was kept; batches apart. Empty if nothing is."""
        mine, theirs = asdict(replace(self, batch=())), asdict(replace(kept, batch=()))
        for name, word in WORDS.items():
            if mine[name] != theirs[name]:
                shown = {"torch": f" ({mine[name]}, kept: {theirs[name]})"}
                if name == "hosts" and len(mine[name]) != len(theirs[name]):
                    return f"another number of ranks ({len(mine[name])}, kept: {len(theirs[name])})"
                return f"{word}{shown.get(name, '')}"
        return ""


@dataclass(frozen=True)
class PlanCache:
    """A folder as a start finds it. decided: what it holds for this job, None if nothing. batch: that was for."""

    folder: Path
    wanted: CacheKey
    decided: PlannedJob | None
    batch: Shapes

    @classmethod
    def found(cls, folder: Path, wanted: CacheKey, transport: Transport) -> "PlanCache":
        """Collective. Rank 0 says why something is not used.

        Raises:
            ValueError: the folder cannot be written. On every rank.
        """
        texts, why = by_rank_zero(transport, lambda: _read(folder))
        decided, batch = None, Shapes()
        if texts:
            decided, batch, why = _for_this(texts, wanted)
        if why and transport.place.rank == 0:
            print(ANEW.format(folder, why))
        return cls(folder, wanted, decided, batch)

    def for_batch(self, batch: Shapes, rank: int) -> PlannedJob | None:
        """What it holds, if it is for batches of this shape; rank 0 says so, or not.

        Args:
            batch: the same on every rank.
        """
        if self.decided is None:
            return None
        is_fit = fits(self.batch, batch)
        if rank == 0:
            why = f"another batch shape ({_shown(batch)}, kept: {_shown(self.batch)})"
            print(USED.format(self.folder) if is_fit else ANEW.format(self.folder, why))
        return self.decided if is_fit else None

    def leave(self, decided: PlannedJob, batch: Shapes, rank: int) -> None:
        """For the next start; rank 0 writes. What it is for comes last, so that half a decision is none."""
        if rank:
            return
        (self.folder / MADE_FOR).unlink(missing_ok=True)
        keep_decision(self.folder, decided)
        write_cache_key(self.folder, replace(self.wanted, batch=batch))


def cache_key(model: nn.Module, optimizer: Optimizer, asked: object, hosts: Sequence[str]) -> CacheKey:
    """
    Args:
        asked: of the plan; what it prints as is compared. hosts: `hosts_of`.
    """
    listing = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in model.named_parameters()]
    steppers = [(type(one).__qualname__, {**one.defaults, "lr": 0}) for one in members(optimizer)]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return CacheKey(str(listing), str(steppers), torch.__version__, machine, tuple(hosts), str(asked))


def hosts_of(transport: Transport) -> tuple[str, ...]:
    """Collective: of every rank, with how many ranks the launcher started there."""
    return tuple(transport.share(f"{socket.gethostname()} ({os.environ.get('LOCAL_WORLD_SIZE', '?')} ranks)"))


def cached_links(folder: Path, wanted: CacheKey) -> Topology | None:
    """Those that a folder holds for this job; rank 0 asks."""
    texts, _ = _read(folder)
    decided = _for_this(texts, wanted)[0] if texts else None
    return None if decided is None else decided.topology


def write_cache_key(folder: Path, wanted: CacheKey) -> None:
    """Beside a decision that was kept there."""
    draft = folder / f"{MADE_FOR}.draft"
    draft.write_text(json.dumps(asdict(wanted), indent=2) + "\n")
    os.replace(draft, folder / MADE_FOR)


def _read(folder: Path) -> tuple[dict[str, str], str]:
    """The files, and why they cannot be read."""
    open_folder(folder)
    if not (folder / MADE_FOR).is_file():
        return {}, ""
    try:
        return {name: (folder / name).read_text() for name in (*FILES, MADE_FOR)}, ""
    except OSError as error:
        return {}, f"a file of it cannot be read ({error.strerror})"


def _for_this(texts: Mapping[str, str], wanted: CacheKey) -> tuple[PlannedJob | None, Shapes, str]:
    try:
        given = json.loads(texts[MADE_FOR])
        batch = tuple(tuple(shape) for shape in given["batch"])
        kept = CacheKey(**{**given, "hosts": tuple(given["hosts"]), "batch": batch})
        plan, profile, topology = (kind.from_json(texts[name]) for name, kind in FILES.items())
    except (ValueError, KeyError, TypeError) as error:
        return None, (), f"it cannot be read ({error})"
    if why := wanted.why_other(kept):
        return None, (), why
    return PlannedJob(profile, topology, plan), batch, ""


def _shown(batch: Shapes) -> str:
    return ", ".join("x".join("any" if one is None else str(one) for one in shape) for shape in batch)


class BatchShapes:
    """Of what goes into the forwards of a model while it trains, from `BatchShapes` to `end`."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Shapes] = []
        hooks = [one.register_forward_pre_hook(self._entered, with_kwargs=True) for one in entrances(model)]
        self._undo: list[Callable[[], None]] = [hook.remove for hook in hooks]

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self.seen.append(shapes_of((args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchShapes":
        return self

    def end(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []


def shapes_of(batch: Any) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in leaves(batch))


def joined(seen: Sequence[Shapes]) -> Shapes:
    """What all of them have in common."""
    found = seen[0] if seen else ()
    for other in seen[1:]:
        if list(map(len, other)) != list(map(len, found)):
            return ()
        found = tuple(
            tuple(mine if mine == theirs else None for mine, theirs in zip(one, two, strict=True))
            for one, two in zip(found, other, strict=True)
        )
    return found


def fits(kept: Shapes, seen: Shapes) -> bool:
    """Whether a batch is of the shape that was kept; where nothing was kept or seen nobody can tell."""
    if not kept or not seen:
        return True
    return list(map(len, kept)) == list(map(len, seen)) and all(
        mine is None or mine == theirs
        for one, other in zip(kept, seen, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    )
