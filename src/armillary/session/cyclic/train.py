"""Trains a workload under a schedule that owns the loop, and tells what happens: the events of `session/train.py`.

A step's losses are known when its last micro-batch has gone through, mostly a step later; progress counts those that
are known. A checkpoint drains the schedule and is a plain single-device one.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from armillary.facts.plan import Forecast
from armillary.facts.trace import Trace
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.saving.checkpoint import latest
from armillary.schedules.chosen import read_choice
from armillary.schedules.random_stream import seed_streams
from armillary.session.cyclic.delayed import DelayedMode
from armillary.session.cyclic.drive import CyclicRun, drive, micro_batches_of
from armillary.session.cyclic.modes import ZeroRingMode
from armillary.session.cyclic.state import load_plain, save_cyclic
from armillary.session.decide import Subject, decide, subject_of
from armillary.session.evaluate import evaluate
from armillary.session.events import Decided, Ended, Evaluated, Event, Progress, Resumed, Saved
from armillary.session.every import Every
from armillary.session.feed import Feed, device_of, stream_seed
from armillary.session.folder import keep_decision, keep_end, note, open_folder
from armillary.session.rank_zero import by_rank_zero
from armillary.session.settings import GLANCE_BATCHES, GLANCES, PROGRESS_STEPS, Settings
from armillary.session.tally import Comparison, reset_peak_memory, resident_bytes
from armillary.session.train import activations_of
from armillary.session.workload import Workload, baseline

__all__ = ["train_cyclic"]


def train_cyclic(workload: Workload, settings: Settings) -> Iterator[Event]:
    """Plans, trains, evaluates, and leaves everything in the run's folder; `settings.wishes` name the schedule.

    Raises:
        ValueError: the folder cannot be written, or the schedule, the model or a checkpoint do not fit.
        FloatingPointError: a loss is not finite.
    """
    subject = subject_of(workload, settings.seed)
    decided = decide(subject, settings.wishes)
    path = latest(settings.checkpoints) if settings.resume else None
    step, loops = load_plain(path, subject.model, subject.optimizer) if path is not None else (0, ())
    feeds = _feeds(workload, decided, settings.seed, loops)
    run = _drive(subject, decided, settings.seed, step)
    by_rank_zero(run.transport, lambda: open_folder(settings.folder))
    if run.rank == 0:
        keep_decision(settings.folder, decided)
    yield decided
    if path is not None:
        yield Resumed(step, path)
    training = _Training(workload, settings, run, feeds, step)
    one_micro_batch = activations_of(decided.profile).memory_bytes
    training.forecast += Forecast(memory_bytes=one_micro_batch * _micro_batches_held(run))
    while training.step < settings.steps:
        training.advance()
        yield from training.look_around()
    yield from training.end()
    run.transport.close()


def _feeds(workload: Workload, decided: Decided, seed: int, loops: tuple[dict[str, Any], ...]) -> list[Feed]:
    """One for every micro-batch, where the loop that was saved for it, or for the first one, left off."""
    count = micro_batches_of(read_choice(decided.plan.schedule, decided.plan.workers), decided.plan.workers)
    if not loops:
        return [Feed(workload, (m, count), seed) for m in range(count)]
    states = [loops[m if m < len(loops) else 0]["feed"] for m in range(count)]
    return [Feed.resume(workload, (m, count), seed, state) for m, state in enumerate(states)]


def _drive(subject: Subject, decided: Decided, seed: int, first_step: int) -> CyclicRun:
    example = next(iter(subject.draw(1)))
    arguments = decided.plan, subject.model, subject.optimizer, subject.loss, example
    return drive(*arguments, seed=seed, first_step=first_step)


def _micro_batches_held(run: CyclicRun) -> float:
    """Activations at a process's peak, in those of one micro-batch, as if stages kept alike."""
    if run.has_own_data:
        return 1.0
    if run.options.mode == "shared":
        return 1 / run.schedule.stages
    ticks = range(2 * run.schedule.period, 4 * run.schedule.period)
    held = max(len(run.schedule.held_after(tick)) for tick in ticks) / run.schedule.stages
    return held if run.options.mode == "one_device" else held / run.workers


class _Training:
    """From the first step to the last. Sums are of this process, since last told; losses lag behind the steps."""

    def __init__(self, workload: Workload, settings: Settings, run: CyclicRun, feeds: list[Feed], step: int):
        self.workload, self.settings, self.run, self.feeds = workload, settings, run, feeds
        self.forecast = run.plan.forecast
        self.every = Every(settings.every_steps, settings.every_seconds)
        self.step = self.first_step = self.told_step = step
        self.loss_sum = self.loss_count = self.samples = 0.0
        self.total_samples = self.train_seconds = self.peak_bytes = 0.0
        self.sent_bytes = self.waited_seconds = 0.0  # per process and step, summed over steps
        reset_peak_memory()
        self.resident_bytes = resident_bytes()[0] - _held_bytes(run)
        self.since = time.perf_counter()

    def advance(self) -> None:
        """One training step. Every feed moves on, so that any process can save where all of them stand."""
        batches = [next(feed) for feed in self.feeds]
        mine = [batches[micro_batch] for micro_batch in self.run.micro_batches]
        seed_streams(stream_seed(self.settings.seed, self.step, self.run.rank), device_of(self.run.model))
        self._count(self.run.step(mine))
        self.step += 1
        if self.run.has_own_data or self.run.options.mode == "one_device" or self.run.rank == 0:
            self.samples += sum(self.workload.samples(batch) for batch in mine)

    def _count(self, finished: list[StepLosses]) -> None:
        for one in finished:
            value = sum(float(loss) for loss in one.losses) / len(one.losses)
            if not math.isfinite(value):
                step = self.first_step + one.step
                good = latest(self.settings.checkpoints)
                remedy = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
                raise FloatingPointError(
                    f"rank {self.run.rank}: the loss is {value} at step {step}; {remedy}. Lower the learning rate: "
                    "late gradients bear less of it"
                )
            self.loss_sum += value
            self.loss_count += 1

    def look_around(self) -> Iterator[Event]:
        """What is due after a step: progress, a glance at held-out data, a checkpoint."""
        is_last = self.step == self.settings.steps
        if is_last:
            self.run.drain()
            self._count(self.run.losses())
        if self.step % PROGRESS_STEPS == 0 or is_last:
            yield self._told(self._progress())
        glance_steps = max(PROGRESS_STEPS, self.settings.steps // GLANCES)
        if self.step % glance_steps == 0 and not is_last:
            yield self._told(Evaluated(self.step, self._evaluate(GLANCE_BATCHES), is_whole=False))
        steps = self.settings.every_steps
        may_save = self.step % PROGRESS_STEPS == 0 or (steps > 0 and self.step % steps == 0)
        if not is_last and may_save and self.every.due(self.run, self.step):
            yield self._save()

    def _told(self, event: Progress | Evaluated) -> Event:
        if self.run.rank == 0:
            note(self.settings.folder, event)
        return event

    def _progress(self) -> Progress:
        seconds, steps = time.perf_counter() - self.since, self.step - self.told_step
        sent, waited = self.run.channel.take()
        everyones = self.run.transport.share((self.loss_sum, self.loss_count, self.samples, sent, waited))
        loss_sum, count, samples, sent_bytes, waited_seconds = (sum(column) for column in zip(*everyones, strict=True))
        self.sent_bytes += sent_bytes / self.run.workers
        self.waited_seconds += waited_seconds / self.run.workers
        self.train_seconds += seconds
        self.total_samples += samples
        self.loss_sum = self.loss_count = self.samples = 0.0
        self.told_step, self.since = self.step, time.perf_counter()
        mean = loss_sum / count if count else math.nan
        return Progress(self.step, mean, samples / seconds, sent_bytes / self.run.workers / steps)

    def _evaluate(self, batches: int | None) -> dict[str, float]:
        """On the newest weights; its time and memory are not those of training."""
        began = time.perf_counter()
        self.peak_bytes = max(self.peak_bytes, resident_bytes()[1])
        with self.run.newest():
            metrics = evaluate(self.workload, self.run, self.settings.seed, batches)
        reset_peak_memory()
        self.since += time.perf_counter() - began
        return metrics

    def _save(self) -> Saved:
        began = time.perf_counter()
        loops = [{"step": self.step, "feed": feed.state()} for feed in self.feeds]
        path = save_cyclic(self.run, self.settings.checkpoints, self.step, loops, self.settings.keep)
        self.since += time.perf_counter() - began
        return Saved(self.step, path)

    def end(self) -> Iterator[Event]:
        """Evaluates on all held-out data, saves, and holds the forecast against what was measured."""
        steps = max(self.step - self.first_step, 1)
        mine = _held_bytes(self.run)
        held = sum(self.run.transport.share(mine)) / self.run.workers
        measured = Forecast(self.sent_bytes / steps, held, self.waited_seconds / steps)
        planned = Forecast()
        for group in self.run.plan.groups:
            planned += group.forecast
        comparison = (Comparison("all groups", self.run.options.mode, planned, measured),)
        if self.step > self.first_step:
            yield self._save()
        metrics = self._evaluate(None)
        peak = self.run.transport.agree_largest([max(mine, self.peak_bytes - self.resident_bytes)])[0]
        yield self._told(Evaluated(self.step, metrics, is_whole=True))
        simple = by_rank_zero(self.run.transport, lambda: baseline(self.workload))
        seconds, rate = self.train_seconds / steps, self.total_samples / (self.train_seconds or math.inf)
        ended = Ended(self.step, metrics, simple, comparison, self.forecast, seconds, rate, peak)
        if self.run.rank == 0:
            keep_end(self.settings.folder, ended, Trace(self.run.rank, ()), self.workload.unit)
        yield ended


def _held_bytes(run: CyclicRun) -> float:
    """Weights and optimizer state between two steps on this process, with a ring's master copies, late gradients and
    tokens, and the rows of tables owned here."""
    masters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    tensors = [*(p for p in run.model.parameters() if not isinstance(p, TableHandle)), *masters]
    tensors += [table.shard for table in run.tables.by_name.values()]
    for entries in [*run.optimizer.state.values(), *run.tables.held.values()]:
        tensors += [value for value in entries.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    late = run.mode.held_bytes if isinstance(run.mode, DelayedMode | ZeroRingMode) else 0
    return float(sum(storages.values()) + late)
