"""The kernel's view of memory: peaks that are over are seen, and what was freed is really gone."""

import weakref

import pytest
import torch
from benchmarks.measuring.measure import one_at_a_time
from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory

MEBIBYTE = 2**20
SLACK_BYTES = 4 * MEBIBYTE  # the kernel counts pages per processor, and the interpreter lives on


def test_a_peak_that_is_over_is_seen():
    return_freed_memory()
    level = begin_watch()
    torch.ones(64 * MEBIBYTE // 4)
    assert peak_bytes(level) - level.pss_bytes == pytest.approx(64 * MEBIBYTE, abs=SLACK_BYTES)
    assert pss_bytes() - level.pss_bytes == pytest.approx(0, abs=SLACK_BYTES)


def test_a_watch_forgets_peaks_before_it():
    torch.ones(64 * MEBIBYTE // 4)
    level = begin_watch()
    assert peak_bytes(level) - level.pss_bytes == pytest.approx(0, abs=SLACK_BYTES)


def test_freed_small_tensors_go_back_to_the_kernel():
    """They lie in the heap, under a block that is still used: freeing alone returns none of it."""
    return_freed_memory()
    before = pss_bytes()
    small = [torch.ones(25_000) for _ in range(640)]
    last = torch.ones(25_000)
    assert pss_bytes() - before == pytest.approx(64_000_000, rel=0.1)
    del small
    return_freed_memory()
    assert pss_bytes() - before == pytest.approx(last.nbytes, abs=SLACK_BYTES)


def test_a_dropped_mode_takes_its_model_along_though_it_is_a_cycle_and_still_held():
    alive: list[weakref.ref[torch.nn.Module]] = []

    def build():
        model = torch.nn.Linear(2, 2)
        model.itself = [model]
        alive.append(weakref.ref(model))
        return lambda: model.weight.sum().item()

    with one_at_a_time({"mode": build})("mode") as built:
        built.step()
        assert alive[0]() is not None
    assert alive[0]() is None
    with pytest.raises(RuntimeError, match="was dropped after its turn"):
        built.step()
