"""Ways of others to train in less memory: torch's checkpoints, and the disk hooks of torch's tutorial in three forms.

Source: torch's tutorial "Hooks for autograd saved tensors". Departures: weights and tensors under 64 KiB stay, and all
but the form through files write to the same shaped lane past the page cache as ours.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from armillary.residency.tier import FileTier

__all__ = ["Files", "checkpointed", "tutorials_files", "tutorials_hooks"]

SAVED = {
    torch.ops.aten.addmm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
SMALL_BYTES = 64 << 10
SLOTS = 2


@contextmanager
def checkpointed(model: nn.Module, is_selective: bool = False) -> Iterator[None]:
    """Torch's own, on every block."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    more = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if is_selective else {}
    for block in model.children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    try:
        yield
    finally:
        for block in model.children():
            del block.forward


class _Carried:
    """A saved tensor in the tier, as the tutorial has it: each alone, whatever storage it shares."""

    def __init__(self, tensor: Tensor, tier: FileTier) -> None:
        self._tier, self._dtype, self._size = tier, tensor.dtype, tensor.size()
        self._flat: Tensor | None = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._nbytes = len(self._flat)
        self._place = tier.take_place(self._nbytes)
        self.gone, self._back = threading.Event(), threading.Event()
        self._is_asked = False
        tier.writes.put(self._write)

    def _write(self) -> None:
        assert self._flat is not None
        self._tier.write(self._flat, self._place)
        self._flat = None
        self.gone.set()

    def fetch(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self.gone.wait()
            self._flat = torch.empty(self._nbytes, dtype=torch.uint8)
            self._tier.reads.put(self._read)

    def _read(self) -> None:
        assert self._flat is not None
        self._tier.read(self._flat, self._place)
        self._back.set()

    def take(self) -> Tensor:
        self.fetch()
        self._back.wait()
        self._tier.give_place(self._place, self._nbytes)
        flat, self._flat = self._flat, None
        assert flat is not None
        return flat.view(self._dtype).view(self._size)


@contextmanager
def tutorials_hooks(model: nn.Module, folder: str, rate: float, has_read_ahead: bool) -> Iterator[None]:
    """Writes where a tensor is saved, reads where it is asked for, and waits each time. With read-ahead, as ours: both
    go on beside compute, with two stages in flight."""
    kept = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    away: list[list[_Carried]] = [[]]  # by block, of this forward

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALL_BYTES or tensor.untyped_storage()._cdata in kept:
            return tensor.detach()
        one = _Carried(tensor, tier)
        if has_read_ahead:
            away[-1].append(one)
        else:
            one.gone.wait()
        return one

    def unpack(found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else found.take()

    def left(block: nn.Module, args: Any, output: Tensor) -> None:
        number, those = len(away) - 1, away
        for stage in those[: max(0, number - SLOTS + 1)]:
            for one in stage:
                one.gone.wait()
        those.append([])

        def read(_: Tensor) -> None:
            for stage in reversed(those[max(0, number - SLOTS + 1) : number + 1]):
                for one in reversed(stage):
                    one.fetch()
                stage.clear()

        output.register_hook(read)

    def begins(block: nn.Module, args: Any) -> None:
        away[:] = [[]]

    blocks, handles = list(model.children()), []
    if has_read_ahead:
        handles = [blocks[0].register_forward_pre_hook(begins), *[b.register_forward_hook(left) for b in blocks]]
    try:
        with FileTier(folder, rate) as tier, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Files:
    """What lies in files, and so in the page cache: now, and the most there was."""

    now_bytes: int = 0
    most_bytes: int = 0
    count: int = field(default=0)


class _InFile:
    """A saved tensor in a file that goes with it."""

    def __init__(self, tensor: Tensor, folder: str, files: Files) -> None:
        files.count += 1
        self._files, self.path = files, Path(folder) / str(files.count)
        torch.save(tensor, self.path)
        self._nbytes = self.path.stat().st_size
        files.now_bytes += self._nbytes
        files.most_bytes = max(files.most_bytes, files.now_bytes)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)
        self._files.now_bytes -= self._nbytes


@contextmanager
def tutorials_files(model: nn.Module, folder: str) -> Iterator[Files]:
    """As the tutorial writes it: torch.save to a file each, through the page cache, as fast as that takes it."""
    kept = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    files = Files()

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALL_BYTES or tensor.untyped_storage()._cdata in kept:
            return tensor.detach()
        return _InFile(tensor, inside, files)

    def unpack(found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else torch.load(found.path)

    with tempfile.TemporaryDirectory(dir=folder) as inside, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield files
