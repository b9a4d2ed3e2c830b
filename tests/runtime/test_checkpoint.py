"""What makes a folder a checkpoint, what happens to it when a save dies, and rows on their way to files and back."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from armillary.checkpoint.folder import (
    MARKER,
    Marker,
    RowIndex,
    latest_checkpoint,
    mark,
    new_folder,
    next_serial,
    prune,
    read_marker,
    stored_rows,
    verify,
)
from armillary.checkpoint.row_file import FileLayout, RowFile
from armillary.exchanges import RankInfo, build_row
from armillary.tables import reshard as row_blocks
from armillary.tables.reshard import all_on_first, equal_spans, from_spans, to_spans
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

ROWS = torch.arange(40.0).view(10, 4)


def written(path, tensors):
    """A file of these tensors, appended two rows at a time."""
    with RowFile(path, {key: FileLayout(tuple(t.shape), t.dtype) for key, t in tensors.items()}) as file:
        for tensor in tensors.values():
            for block in tensor.split(2) if len(tensor) else []:
                file.append(block)
        return file.finish()


def save_one(parent: Path, step: int, keep: int = 3) -> Path:
    """A save by one worker: one file of rows."""
    folder = new_folder(parent, step)
    record = written(folder / "rows.safetensors", {"model/t": ROWS + step})
    index = {"model/t": RowIndex((10, 4), "float32", (("rows.safetensors", 0, 10),))}
    mark(folder, Marker(step, next_serial(parent), 1, (record,), index, {}))
    prune(parent, keep)
    return folder


def content(folder: Path) -> torch.Tensor:
    marker = read_marker(folder)
    verify(folder, marker.files)
    return stored_rows(folder, marker)["model/t"].read(0, 10)


def test_the_safetensors_library_opens_what_was_appended_in_blocks_of_any_dtype(tmp_path):
    tensors = {
        "wide": torch.randn(5, 3, dtype=torch.float64),
        "half": torch.randn(7, 2).bfloat16(),
        "flat": torch.randn(9).half(),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([[True, False, True]]),
    }
    written(tmp_path / "f.safetensors", tensors)
    found = load_file(tmp_path / "f.safetensors")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="complex64"):
        RowFile(tmp_path / "f.safetensors", {"z": FileLayout((1,), torch.complex64)})


def test_rows_are_read_across_the_files_that_hold_them(tmp_path):
    parts = (("a", 0, 4), ("b", 4, 8), ("c", 8, 10))
    records = tuple(written(tmp_path / name, {"k": ROWS[first:last]}) for name, first, last in parts)
    marker = Marker(1, 1, 3, records, {"k": RowIndex((10, 4), "float32", parts)}, {})
    rows = stored_rows(tmp_path, marker)["k"]
    for first in range(10):
        for last in range(first, 11):
            assert torch.equal(rows.read(first, last), ROWS[first:last])


class Killed(BaseException):
    """The process dies here."""


def dying_at(moment, monkeypatch):
    """The process is killed at its `moment`-th dealing with the file system: an open, sync, rename or removal."""
    count = 0

    def fatal(function):
        def replaced(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return function(*args, **kwargs)

        return replaced

    for owner, name in [
        (os, "fsync"), (os, "mkdir"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (Path, "open"),
        (Path, "mkdir"), (Path, "replace"), (Path, "unlink"), (shutil, "rmtree"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, fatal(getattr(owner, name)))


@pytest.mark.filterwarnings("ignore:checkpoint. skipped:UserWarning")
def test_a_save_killed_at_any_moment_leaves_a_good_checkpoint_and_the_next_save_works(tmp_path):
    moment, died = 0, True
    while died:
        moment += 1
        parent = tmp_path / str(moment)
        for step in (1, 2):
            save_one(parent, step, keep=2)
        died = False
        with pytest.MonkeyPatch.context() as patch:
            dying_at(moment, patch)
            try:
                save_one(parent, 3, keep=2)
            except Killed:
                died = True
        newest = latest_checkpoint(parent)
        assert newest is not None, moment
        step = read_marker(newest).step
        assert step in (2, 3)
        assert torch.equal(content(newest), ROWS + step)
        again = save_one(parent, 3, keep=2)
        assert latest_checkpoint(parent) == again
        assert torch.equal(content(again), ROWS + 3)
    assert moment > 10  # every kind of change was met


def test_only_the_newest_checkpoints_stay(tmp_path):
    for step in (10, 20, 30, 40):
        save_one(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_the_newest_is_the_one_saved_last_not_the_one_of_the_highest_step(tmp_path):
    save_one(tmp_path, 200)
    gone_back = save_one(tmp_path, 150)
    assert latest_checkpoint(tmp_path) == gone_back


def test_saving_a_step_twice_never_touches_the_first(tmp_path):
    first = save_one(tmp_path, 5)
    second = save_one(tmp_path, 5)
    assert first != second
    assert torch.equal(content(first), content(second))
    assert latest_checkpoint(tmp_path) == second


def test_unfinished_and_short_checkpoints_are_skipped_with_a_warning_that_names_them(tmp_path):
    good = save_one(tmp_path, 1)
    short = save_one(tmp_path, 2)
    unmarked = save_one(tmp_path, 3)
    os.truncate(short / "rows.safetensors", 100)
    (unmarked / MARKER).unlink()
    with pytest.warns(UserWarning, match=r"step-00000002.*100 bytes.*step-00000003: unfinished"):
        assert latest_checkpoint(tmp_path) == good
    with pytest.raises(ValueError, match="100 bytes"):
        read_marker(short)
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        read_marker(unmarked)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    folder = save_one(tmp_path, 1)
    with (folder / "rows.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x55")
    with pytest.raises(ValueError, match="damaged"):
        content(folder)


def test_a_file_written_elsewhere_is_missed_before_the_folder_is_marked(tmp_path):
    folder = new_folder(tmp_path, 1)
    record = written(folder / "rows.safetensors", {"model/t": ROWS})
    (folder / "rows.safetensors").unlink()
    with pytest.raises(OSError, match="shared file system"):
        mark(folder, Marker(1, 1, 1, (record,), {}, {}))
    with pytest.warns(UserWarning, match="unfinished"):
        assert latest_checkpoint(tmp_path) is None


def test_an_empty_or_absent_folder_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def table_of(whole, options, place):
    return RowTable.owning(
        whole, build_row("owned_rows", **options), place, name="t", has_window=False, requires_grad=True,
        reads=None, norms=None,
    )  # fmt: skip


def there_and_back(rank, world, options, shape, dtype, block_bytes):
    """Spans as every rank sees them, and whether what was read back is each rank's shard."""
    transport = Transport()
    row_blocks.BLOCK_BYTES = block_bytes
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    table = table_of(whole, options, RankInfo(rank, world))
    answers = []
    for spans in (equal_spans(shape[0], world), all_on_first(shape[0], world)):
        blocks = [(first, block.clone()) for first, block in to_spans(table.shard, table, spans, transport)]
        rows = torch.cat([block for _, block in blocks])
        first, last = spans[rank]
        limit = max(1, block_bytes // (whole[0].numel() * whole.element_size()))
        assert all(len(block) <= limit for _, block in blocks)
        assert torch.equal(rows, whole[first:last])
        into = torch.zeros_like(table.shard)
        from_spans(lambda low, high: whole[low:high], into, table, spans, transport)
        answers.append(torch.equal(into, table.shard))
    row_blocks.BLOCK_BYTES = 16 << 20
    transport.close()
    return all(answers)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "shape", "dtype", "block_bytes"),
    [
        ({}, (23, 3), torch.float32, 48),
        ({"order": "hashed"}, (23, 3), torch.bfloat16, 30),
        ({"owners": 1}, (17,), torch.float64, 1 << 20),
        ({"owners": 2}, (3, 2, 2), torch.float16, 1),
    ],
)
def test_rows_reach_contiguous_spans_in_bounded_blocks_and_return(crew, world, options, shape, dtype, block_bytes):
    assert all(crew(world).run(there_and_back, options, shape, dtype, block_bytes))
