"""Laws of a run's picture and of the sample of held-out batches behind its curve."""

import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from itertools import count

import pytest

from armillary.cli.names import find, small
from armillary.plans import Axis, Choice, Forecast, Group, Mesh, Plan, Trace
from armillary.session.events import Ended
from armillary.session.plots import plot
from armillary.session.report import Comparison
from armillary.session.run_folder import keep_end
from armillary.session.train_settings import AMONG, validation_batches


def plan():
    groups = [("in", "row_sharded", "owned_rows"), ("out", "replicated", "gather_rows")]
    groups = [Group(name, (name,), layout, Choice(exchange)) for name, layout, exchange in groups]
    groups.append(Group("rest", ("weight", "bias"), "replicated", Choice("all_reduce")))
    return Plan(Mesh((Axis("data", 2),)), tuple(groups), "m")


def ended_with(baseline):
    return Ended(
        steps=20, metrics={"perplexity": 8.0}, baseline=baseline, comparison=(), forecast=Forecast(seconds=0.02),
        step_seconds=0.03, samples_per_second=6.0, peak_bytes=1.0, resident_bytes=1.0,
    )  # fmt: skip


def test_a_plot_says_what_it_shows():
    """Units on every axis, what was trained how, and which points may be held against which."""
    lines = [
        {"kind": "progress", "step": 10, "loss": 2.0, "samples_per_second": 5.0},
        {"kind": "evaluated", "step": 10, "metrics": {"perplexity": 9.0}, "is_whole": False},
        {"kind": "progress", "step": 20, "loss": 1.0, "samples_per_second": 6.0},
        {"kind": "evaluated", "step": 20, "metrics": {"perplexity": 8.0}, "is_whole": True},
    ]
    figure = plot(lines, ended_with({"perplexity": 10.0}), find("language_model", small("language_model")), plan())
    assert figure.get_suptitle() == (
        f"language_model, {date.today()}\n"
        "2 workers, simultaneous: 1 table by rows, 1 by gather_rows, rest by all_reduce\n"
        "time of a step: forecast 20.0 ms, measured 30.0 ms"
    )
    panels = figure.axes
    assert [panel.get_ylabel() for panel in panels] == [
        "training loss\n(mean over workers)", "held-out perplexity", "throughput\n(words per second, all workers)"
    ]  # fmt: skip
    assert panels[-1].get_xlabel() == "optimizer steps"
    assert list(panels[0].lines[0].get_ydata()) == [2.0, 1.0]
    glances, whole, simpler = panels[1].lines  # of other data than the glances, so not joined to them
    assert (list(glances.get_ydata()), list(whole.get_ydata())) == ([9.0], [8.0])
    assert [str(line.get_label()) for line in (whole, simpler)] == [
        "all held-out data: 8", "a smoothed bigram model, all held-out data: 10"
    ]  # fmt: skip
    assert {line.get_linestyle() for panel in panels for line in panel.lines if line is not simpler} == {"None"}


def test_three_points_are_joined():
    steps = [{"kind": "progress", "step": step, "loss": 1.0, "samples_per_second": 5.0} for step in (1, 2, 3)]
    glances = [{"kind": "evaluated", "step": step, "metrics": {"error": 9.0}, "is_whole": False} for step in (1, 2, 3)]
    panels = plot([*steps, *glances], ended_with({"error": 1.0}), Nameless(), plan()).axes
    assert [panel.lines[0].get_linestyle() for panel in panels] == ["-", "-", "-"]
    assert str(panels[1].lines[1].get_label()) == "baseline, all held-out data: 1"


def test_where_there_is_no_drawing_library_a_run_keeps_all_but_its_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.warns(UserWarning, match=r"plot.png is not drawn: .* pip install 'armillary\[plot\]'"):
        keep_end(tmp_path, ended_with({}), Trace(((),)), Nameless(), plan())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json", "trace.json"]


class Nameless:
    """A workload that does not say what its baseline is called."""

    name, unit = "task", "words"


def test_every_batch_of_a_stream_is_as_likely_to_be_glanced_at():
    seen = Counter(number for seed in range(2000) for number in validation_batches(iter(range(10)), 3, seed))
    assert sum(seen.values()) == 6000
    assert all(count == pytest.approx(600, abs=80) for count in seen.values())  # four standard deviations


def test_a_sample_is_the_same_again_and_draws_no_more_than_it_may():
    endless = count()
    first = validation_batches(endless, 3, seed=1)
    assert first == validation_batches(count(), 3, seed=1) != validation_batches(count(), 3, seed=2)
    assert next(endless) == AMONG
    assert validation_batches(iter("ab"), 3, seed=1) == ["a", "b"]


def test_a_plot_shows_forecast_beside_measured_of_the_longest_groups_and_of_the_others_together():
    def line(number):
        return Comparison(f"group {number}", "all_reduce", Forecast(seconds=number * 1e-3), Forecast(seconds=2e-3))

    lines = [{"kind": "progress", "step": step, "loss": 2.0, "samples_per_second": 5.0} for step in (10, 20, 30)]
    compared = (*map(line, range(1, 11)), Comparison("idle", "", Forecast(), Forecast()))
    ended = replace(ended_with({}), comparison=compared)
    *_, last = plot(lines, ended, find("language_model", small("language_model")), plan()).axes
    assert [label.get_text() for label in last.get_yticklabels()] == [
        *(f"group {number}" for number in range(10, 2, -1)), "2 others"
    ]  # fmt: skip
    forecast, measured = last.containers[:2]
    assert [bar.get_width() for bar in forecast] == pytest.approx([*range(10, 2, -1), 3.0])
    assert [bar.get_width() for bar in measured] == pytest.approx([2.0] * 8 + [4.0])
    assert [text.get_text() for text in last.get_legend().get_texts()] == ["forecast", "measured"]
