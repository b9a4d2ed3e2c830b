"""Trains a workload under a plan, and tells what happens as it goes.

`train` is a generator of events, so that whoever runs it decides what to show: the command line draws a progress bar,
a test collects them. Every rank iterates over it alike; only rank 0 writes files.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from armillary.checkpoint.folder import latest_checkpoint
from armillary.models.preserved_state import LiveBytes
from armillary.plans.mesh import DATA, STAGE
from armillary.plans.plan import SIMULTANEOUS
from armillary.plans.requests import summed
from armillary.schedules.random_streams import seed_streams
from armillary.schedules.registry import options_of
from armillary.session.attach import attach
from armillary.session.data_check import alike_ranks
from armillary.session.events import (
    Ended,
    Evaluated,
    Event,
    NothingLeft,
    PlannedJob,
    Progress,
    Resumed,
    Saved,
    Warned,
)
from armillary.session.health import health_of
from armillary.session.plan_cache import cache_key, hosts_of, write_cache_key
from armillary.session.plan_job import model_to_plan, plan_job
from armillary.session.report import compare, held_by_group
from armillary.session.run import Run
from armillary.session.run_folder import forget_after, keep_decision, keep_end, keep_others_out, note, open_folder
from armillary.session.save import CheckpointEvery
from armillary.session.traffic_meter import TrafficMeter, everyones_trace, usual_seconds
from armillary.session.train_settings import (
    PROGRESS_STEPS,
    VALIDATION_BATCHES,
    WATCHED_STEP,
    Settings,
    apply_new_options,
    group_options,
    reset_peak_memory,
    resident_bytes,
    resume_plan,
    validation_batches,
    validation_interval,
)
from armillary.session.workload import Batch, Workload, baseline, device_of, opened, stream_seed, together
from armillary.stages.optimizer_step import Options
from armillary.stages.train_spec import StepLosses
from armillary.transport.agreement import by_rank_zero

__all__ = ["train"]

MOVED_OWNERS = (
    "this checkpoint's tables had been moved to other owners by --rebalance-every, which no longer exists; their rows "
    "are dealt as the plan says, with the same values. Name an exchange "
    "of rows for the table, with other options (--exchange), to deal them otherwise"
)


def train(workload: Workload, settings: Settings) -> Iterator[Event]:
    """Plans, trains, evaluates, and leaves everything in the run's folder. A run that goes on does so under its plan.

    Raises:
        ValueError: the folder cannot be written, another run is at work in it, or the plan does not fit.
        FloatingPointError: this rank's loss is not finite; nothing of that step was exchanged.
    """
    subject = model_to_plan(workload, settings.seed)
    wanted = cache_key(subject.model, subject.optimizer, "train", ())
    settings = resume_plan(settings, wanted)
    decided = plan_job(subject, replace(settings.request, times_prefetch=True))
    loss = workload.loss if decided.plan.schedule != SIMULTANEOUS else partial(_finite_loss, workload)
    run = attach(
        decided.plan, subject.model, subject.optimizer, loss=loss, example=next(iter(subject.draw(1))),
        seed=settings.seed, topology=decided.topology, profile=decided.profile,
    )  # fmt: skip
    by_rank_zero(run._transport, lambda: open_folder(settings.folder))
    with ExitStack() as held:
        by_rank_zero(run._transport, lambda: keep_others_out(settings.folder, held))
        yield decided
        training = Training(workload, settings, run, decided)
        wanted = replace(wanted, hosts=hosts_of(run._transport))
        yield from training.resume()
        if training.step < settings.steps:
            yield from training.begin()
            if run.rank == 0:
                write_cache_key(settings.folder, wanted)  # links stay for a run that goes on
            while training.step < settings.steps:
                training.advance()
                yield from training.look_around()
            yield from training.end()
        else:
            yield NothingLeft(training.step)
    run.close(gather=False)


def _finite_loss(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    """Refused before anything of it is exchanged."""
    loss = workload.loss(model, batch)
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}")
    return loss


class Training:
    """A run from its first step, or the one it resumes at, to its last. Sums are of this rank, since last told; losses
    may lag behind the steps.

    drawn: its micro-batches by step, with the place after them; reached: the place after those trained on last.
    left: what an earlier part of the run saved of its loop; begun: options of the optimizer, before any scheduler.
    """

    def __init__(self, workload: Workload, settings: Settings, run: Run, decided: PlannedJob):
        self.workload, self.settings, self.run = workload, settings, run
        self.job = run._engine
        options = options_of(run.plan)
        self.count = options.total(run.workers)  # micro-batches of a step, those of all ranks
        self.mine = options.handed_in(run.rank, run.workers)
        self.counts_samples = run.plan.mesh.coordinates(run.rank).get(STAGE, 0) == 0
        self.drawn = self._drawn(None)
        self.reached: dict[str, Any] = {}
        self.left: dict[str, Any] = {}
        self.begun = group_options(self.job.optimizer)
        self.resident_bytes = 0.0  # before training, without the plan's tensors
        self.every = CheckpointEvery(settings.every_steps, settings.every_seconds)
        self.step = self.told_step = 0
        self.loss_sum = self.loss_count = self.samples = 0.0
        self.since = time.perf_counter()
        self.carry_out(decided)

    def carry_out(self, decided: PlannedJob) -> None:
        """What is measured from here on is held against this plan."""
        self.decided = decided
        self.traffic_meter = self.job.traffic_meter = TrafficMeter(decided.plan)
        of_step = decided.plan.activation_bytes or decided.profile.peak_bytes
        of_groups = decided.plan.forecast
        seconds = decided.plan.step_seconds or of_groups.seconds  # of a plan that nobody played: one after another
        self.forecast = replace(of_groups, memory_bytes=of_groups.memory_bytes + of_step, seconds=seconds)
        self.plan_step = self.step
        self.live, self.step_seconds = LiveBytes(), list[float]()
        self.total_samples = self.train_seconds = self.peak_bytes = 0.0

    def _drawn(self, left: Mapping[str, Any] | None) -> Iterator[tuple[Sequence[Batch], dict[str, Any]]]:
        """Through the run only where the plan prefetches, since that costs a round a step.

        Args:
            left: the place that an earlier part of this training saved.
        """
        feeds = opened(self.workload, self.mine, self.count, self.settings.seed, left)
        return self.run.batches(together(feeds)) if self.run.plan.looks_ahead else together(feeds)

    def resume(self) -> Iterator[Event]:
        """Goes back to where the last whole checkpoint left off, if asked to."""
        if not self.settings.resume:
            return
        path = latest_checkpoint(self.settings.checkpoints)
        self.left = self.run.load(path)
        if path is None:
            yield Warned(f"{self.settings.folder} holds no whole checkpoint, so training begins at step 0")
            return
        self.step = self.told_step = self.plan_step = int(self.left["step"])
        self.drawn = self._drawn(self.left)
        yield Resumed(self.step, path, self._take_options(self.left.get("options")))

    def _take_options(self, begun: Options | None) -> str:
        """Those of the optimizer, where other ones are asked now than this training began with."""
        asked, self.begun = self.begun, begun or self.begun
        if not self.settings.asks_options:
            return ""
        remark = apply_new_options(self.job.optimizer, self.begun, asked)
        self.begun = asked
        return remark

    def begin(self) -> Iterator[Event]:
        """Opens the run's folder to what comes, and looks whether ranks draw the same data."""
        if self.run.rank == 0:
            keep_decision(self.settings.folder, self.decided)
            forget_after(self.settings.folder, self.step)
        if "owners" in self.left:
            yield Warned(MOVED_OWNERS)
        places = [(micro_batch, self.count, self.settings.seed) for micro_batch in self.mine]
        first = [next(self.workload.batches("train", *place), None) for place in places]
        for same in alike_ranks(first, self.job.transport) if options_of(self.run.plan).method.axis == DATA else []:
            ranks = ", ".join(map(str, same))
            yield Warned(f"ranks {ranks} draw the same training data; batches() must give each worker its own share")
        reset_peak_memory()
        self.resident_bytes = resident_bytes()[0] - sum(held_by_group(self.job).values())
        self.job.transport.take_records()  # of before the first step
        self.since = time.perf_counter()

    def advance(self) -> None:
        """One optimizer step. Of two of them, one after the other, the tensors made are counted: what the first leaves
        takes the place of what was left before it, so the second adds to that."""
        began, last = time.perf_counter(), self.settings.steps - 1 - self.plan_step
        until_watched = min(WATCHED_STEP, last) - (self.step - self.plan_step)
        is_watched = until_watched in (0, 1)
        if until_watched == 0:
            self.live.mark()
        seed_streams(stream_seed(self.settings.seed, self.step, self.run.rank), device_of(self.job.model))
        batches, self.reached = next(self.drawn)
        try:
            with self.live if is_watched else nullcontext():
                finished = self.run.step(batches)
        except FloatingPointError as error:
            raise FloatingPointError(self._said(str(error), self.step)) from None
        self._learn_of(finished)
        if not is_watched:
            self._time(began)
        self.step += 1
        if self.counts_samples:
            self.samples += sum(map(self.workload.samples, batches))

    def _time(self, began: float) -> None:
        """The step that ends now."""
        seconds = time.perf_counter() - began
        self.step_seconds.append(seconds)
        self.traffic_meter.add_step(self.step, began - self.job.transport.origin_seconds, seconds)

    def _learn_of(self, finished: Sequence[StepLosses]) -> None:
        for one in finished:
            value = sum(float(loss) for loss in one.losses) / len(one.losses)
            if not math.isfinite(value):
                raise FloatingPointError(self._said(f"the loss is {value}", one.step))
            self.loss_sum += value
            self.loss_count += 1

    def _said(self, fault: str, step: int) -> str:
        good = latest_checkpoint(self.settings.checkpoints)
        remedy = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        return (
            f"rank {self.run.rank}: {fault} at step {step}; {remedy}. Lower the learning rate, or look at this rank's "
            "batch"
        )

    def look_around(self) -> Iterator[Event]:
        """What is due after a step: progress, a glance at held-out data, a checkpoint."""
        is_last = self.step == self.settings.steps
        if is_last:
            self._learn_of(self.job.drained())
        if self.step % PROGRESS_STEPS == 0 or is_last:
            yield self._told(self._progress())
        is_due = self.step % validation_interval(self.settings.steps) == 0
        if is_due or is_last:  # beside all of the split, of which a glance is an estimate
            yield self._told(Evaluated(self.step, self._evaluate(is_whole=False), is_whole=False))
        if not is_last and self._is_save_due():
            yield self._save()

    def _is_save_due(self) -> bool:
        """Ranks agree on the time at few steps only, because to agree costs a message."""
        steps = self.settings.every_steps
        may_be = self.step % PROGRESS_STEPS == 0 or (steps > 0 and self.step % steps == 0)
        return may_be and self.every.due(self.run, self.step)

    def _told(self, event: Progress | Evaluated) -> Event:
        if self.run.rank == 0:
            note(self.settings.folder, event)
        return event

    def _progress(self) -> Progress:
        """Adds up what all ranks did since the last time; outside the trace."""
        seconds = time.perf_counter() - self.since
        steps, workers = self.step - self.told_step, self.run.workers
        before = self.traffic_meter.sent_bytes
        self.job.count()
        sums = [self.loss_sum, self.loss_count, self.samples, self.traffic_meter.sent_bytes - before]
        mine = torch.tensor(sums, dtype=torch.float64)
        with self.job.transport.unrecorded():
            loss_sum, count, samples, sent = self.job.transport.complete(summed(mine), "progress").tolist()
        self.train_seconds += seconds
        self.total_samples += samples
        self.loss_sum = self.loss_count = self.samples = 0.0
        self.told_step, self.since = self.step, time.perf_counter()
        mean = loss_sum / count if count else math.nan
        return Progress(self.step, mean, samples / seconds, sent / workers / steps)

    def _evaluate(self, *, is_whole: bool) -> dict[str, float]:
        """Its time and memory are not those of training."""
        began = time.perf_counter()
        self.peak_bytes = max(self.peak_bytes, resident_bytes()[1])
        totals = self.run.evaluate(self._held_out() if is_whole else self._sample, self.workload.evaluate)
        reset_peak_memory()
        self.since += time.perf_counter() - began
        return dict(self.workload.report(totals))

    def _held_out(self) -> Iterator[Batch]:
        return self.workload.batches("held_out", self.run.rank, self.run.workers, self.settings.seed)

    @cached_property
    def _sample(self) -> list[Batch]:
        """What every glance looks at, of a resumed run too: it depends on nothing but the seed and the rank."""
        return validation_batches(
            self._held_out(), VALIDATION_BATCHES, stream_seed(self.settings.seed, 0, self.run.rank)
        )

    def _save(self) -> Saved:
        began = time.perf_counter()
        loop: dict[str, Any] = {"step": self.step, **self.reached, "options": self.begun}
        path = self.run.save(self.settings.checkpoints, loop=loop, keep=self.settings.keep)
        self.since += time.perf_counter() - began
        return Saved(self.step, path)

    def end(self) -> Iterator[Event]:
        """Evaluates on all held-out data, saves, and holds the forecast against what was measured."""
        trace = everyones_trace((*self.traffic_meter.records, *self.traffic_meter.step_records), self.job.transport)
        comparison, health = compare(self.job, self.traffic_meter, trace), health_of(self.job)
        beside = tuple(self.job.tables_of_report())
        yield self._save()
        metrics = self._evaluate(is_whole=True)
        held = sum(held_by_group(self.job).values())
        mine = [held + self.live.added_bytes, max(held, self.peak_bytes - self.resident_bytes)]
        peak, resident = self.job.transport.agree_largest(mine)
        yield self._told(Evaluated(self.step, metrics, is_whole=True))
        steps, seconds = self.step - self.plan_step, self.train_seconds
        usual = usual_seconds(self.step_seconds or [seconds / steps], self.traffic_meter.period)
        simple = by_rank_zero(self.job.transport, lambda: baseline(self.workload))
        rate = self.total_samples / seconds
        figures = (self.forecast, usual, rate, peak, resident, self.plan_step)
        ended = Ended(self.step, metrics, simple, comparison, *figures, health, beside)
        if self.run.rank == 0:
            keep_end(self.settings.folder, ended, trace, self.workload, self.decided.plan)
        yield ended
