"""Forecasts made visible and held against runs: timeline, curves, comparison."""

import json
from dataclasses import asdict, replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import armillary
from armillary.cli.compare import _page
from armillary.cli.measure import survey
from armillary.cli.names import find, small
from armillary.measuring.links import THOROUGH
from armillary.planning.clock import chrome_trace
from armillary.planning.planner import plan
from armillary.planning.pricing import SGD, Case
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Forecast, Record, Topology, Trace, page_text
from armillary.plans.group import Band
from armillary.session.attach import attach
from armillary.session.compare import compare_run
from armillary.session.simulate import plot_scaling, powers_of_two, scaling
from armillary.session.traffic_meter import OTHER
from planning_cases import dense, machines, model, table
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for


@pytest.fixture
def scene():
    """A table and a dense parameter on 2 nodes of 2."""
    profile = model(table("t.weight", 0, rows=1000), dense("d.weight", 500_000, 1), per_node=2, seconds=0.03)
    topology = machines(2, 2, megabits=100.0)
    made = plan(profile, topology, constraints={"t.weight": Choice("owned_rows")}, assumptions=SGD)
    return made, Case(profile, topology, SGD)


# Timeline ------------------------------------------------------------------------------------------------------------


def test_a_chrome_trace_has_every_span_in_microseconds_on_the_thread_of_its_lane(scene):
    played = simulate(*scene)
    trace = json.loads(json.dumps(chrome_trace(played)))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == [
        "processor", "link inside the node", "link between nodes", "not hidden: the processor waits"
    ]  # fmt: skip
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == len(played.spans)
    assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(played.step_seconds * 1e6)
    assert sum(event["args"]["sent_bytes"] for event in drawn) == pytest.approx(scene[0].forecast.sent_bytes)
    waits = sum(event["dur"] for event in drawn if names[event["tid"]].startswith("not hidden"))
    assert waits == pytest.approx(1e6 * sum(played.exposed_seconds.values()))


# Curves --------------------------------------------------------------------------------------------------------------


def test_curves_are_of_every_number_of_workers_and_no_plan_beats_compute_alone():
    task, topology = find("language_model", small("language_model")), machines(2, megabits=100.0)
    ways = {"chosen": {}, "whole": {"*": "replicated"}}
    found = scaling(task, topology, powers_of_two(1024), ways)
    assert [curve.name for curve in found.curves] == ["chosen", "whole"]
    for curve in found.curves:
        assert [point.workers for point in curve.points] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
        for point in curve.points:
            assert point.samples_per_second <= found.samples * point.workers / found.compute_seconds
            assert 0 <= point.exposed_seconds < point.step_seconds
    long = "compute as profiled here on one core, the same for any number of workers; " * 2
    figure = plot_scaling([found], ["links by hand", "no stragglers", long])
    FigureCanvasAgg(figure).draw()
    for text in figure.texts:  # nothing is cut off
        ends = text.get_window_extent()
        assert ends.x0 >= 0 and ends.x1 <= figure.bbox.width, text.get_text()
    (axes,) = figure.axes
    assert axes.get_ylabel() == "words per second, all workers" and axes.get_xlabel() == "workers"
    assert "links by hand" in figure.get_supxlabel() and "no stragglers" in figure.get_supxlabel()


def test_workers_that_do_not_fill_nodes_are_refused():
    task = find("language_model", small("language_model"))
    with pytest.raises(ValueError, match="3 workers do not fill nodes of 2"):
        scaling(task, machines(2, 2), [3], {"chosen": {}})


# Survey --------------------------------------------------------------------------------------------------------------


def look(rank, workers):
    told = []
    effort = replace(THOROUGH, sizes=(1 << 10, 1 << 14), rows=1)
    found = survey(find("language_model", small("language_model")), 0, told.append, effort)
    return found.topologies, found.profile.model_fingerprint, found.profile.workers, told


def test_a_survey_finds_the_same_machines_on_every_rank_and_the_stages_of_the_model(crew):
    one, other = crew(2).run(look)
    assert one[:3] == other[:3]
    (topology,) = one[0]
    assert topology.workers == one[2] == 2
    assert [link.request for link in topology.requests] == ["AllReduce", "AllGather", "AllToAll"]
    assert one[3][-1] == "stages of language_model"


# Order ---------------------------------------------------------------------------------------------------------------


def asked_in_a_step(rank, world, made):
    """By group, in the order in which this rank asked, of its second step."""
    model = Mixed()
    run = attach(made, model, OPTIMIZERS["sgd"](model.parameters()), loss=loss)
    for step in (0, 1):
        run.step([batch_of(rank, step)])
    run.report()
    records = sorted(run._engine.traffic_meter.records, key=lambda record: record.start_seconds)
    run.close()
    return [record.group for record in records if record.step == 1]


def test_a_clock_makes_the_requests_of_a_step_in_the_order_of_a_run(crew):
    """Between the launch of an exchange and its last request come those of others, also where one makes three."""
    batches = [batch_of(worker, step) for step in range(2) for worker in range(2)]
    seen = armillary.profile(Mixed(), batches, loss, workers=2)
    made = plan_for(Mixed(), 2, Choice("gather_rows"), Choice("all_reduce"))
    first, *others = made.groups
    made = replace(made, groups=(replace(first, exchange=Choice("sparse_all_reduce")), *others))
    played = simulate(made, Case(seen, machines(1, 2), SGD))
    expected = [flight.group for flight in played.flights]
    assert expected != sorted(expected, key=expected.index), "nothing takes turns"
    for asked in crew(2).run(asked_in_a_step, made):
        assert asked == expected


# Comparison ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path, scene):
    """A run that went as forecast."""
    made, case = scene
    made.save(tmp_path / "plan.json")
    case.profile.save(tmp_path / "profile.json")
    case.topology.save(tmp_path / "topology.json")
    played = simulate(made, case)
    records = tuple(replace(record, step=step) for step in range(3) for record in played.trace.ranks[0])
    Trace((records, records)).save(tmp_path / "trace.json")
    sent = played.sent_bytes
    lines = [
        {"group": g.name, "exchange": str(g.exchange), "forecast": asdict(g.forecast),
         "measured": {"sent_bytes": sent[g.name], "memory_bytes": g.forecast.memory_bytes, "seconds": 9.0}}
        for g in made.groups
    ]  # fmt: skip
    lines.append({"group": OTHER, "exchange": "", "forecast": asdict(Forecast()),
                  "measured": {"sent_bytes": sent["look-ups"], "memory_bytes": 0.0, "seconds": 9.0}})  # fmt: skip
    held = made.forecast.memory_bytes
    summary = {
        "comparison": lines, "forecast": asdict(made.forecast), "peak_bytes": held, "resident_bytes": 3 * held,
        "step_seconds": played.step_seconds, "steps": 3,
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def edited(folder, edit):
    summary = json.loads((folder / "summary.json").read_text())
    edit(summary)
    (folder / "summary.json").write_text(json.dumps(summary))


def outside(found):
    return {line.group: line.outside for line in found.lines if line.outside}


def test_a_run_that_went_as_forecast_is_within_any_band(run_folder):
    found = compare_run(run_folder, Band(1e-6, 1e-6, 1e-6))
    assert found.is_within
    assert [line.group for line in found.lines] == ["t.weight", "bucket 0", OTHER, "step", "process"]


def test_what_nobody_forecasts_is_shown_without_a_band(run_folder):
    process = compare_run(run_folder, Band(0, 0, 0)).lines[-1]
    assert process.forecast is None and process.outside == ()
    assert process.measured.memory_bytes == json.loads((run_folder / "summary.json").read_text())["resident_bytes"]


@pytest.mark.parametrize(
    ("name", "field", "factor"),
    [("t.weight", "sent_bytes", 2.0), ("bucket 0", "sent_bytes", 1.1), ("bucket 0", "memory_bytes", 1.2)],
)
def test_a_fault_in_the_forecast_of_a_group_is_found(run_folder, scene, name, field, factor):
    """A tenth of the bytes, where it is no more than a thousandth of the step's."""
    made, _ = scene
    group = next(one for one in made.groups if one.name == name)
    wrong = replace(group, forecast=replace(group.forecast, **{field: factor * getattr(group.forecast, field)}))
    made.with_group(wrong).save(run_folder / "plan.json")
    assert outside(compare_run(run_folder, Band()))[name] == (field,)


def test_the_memory_of_a_step_is_that_of_its_tensors_in_its_fullest_moment(run_folder):
    edited(run_folder, lambda summary: summary.update(peak_bytes=1.2 * summary["peak_bytes"]))
    assert outside(compare_run(run_folder, Band())) == {"step": ("memory_bytes",)}


@pytest.mark.parametrize(
    ("field", "factor", "inside"),
    [("sent_bytes", 1.03, Band(sent_bytes=0.04)), ("memory_bytes", 0.85, Band(memory_bytes=0.2))],
)
def test_a_group_that_differs_by_more_than_its_band_is_named_with_the_figure(run_folder, field, factor, inside):
    def more(summary):
        summary["comparison"][1]["measured"][field] *= factor

    edited(run_folder, more)
    assert outside(compare_run(run_folder, Band()))["bucket 0"] == (field,)
    assert "bucket 0" not in outside(compare_run(run_folder, inside))


def test_a_row_that_is_off_and_passes_says_why(run_folder, scene):
    """Look-ups are a thousandth of the step's bytes, so nearly half of them more hurt nobody."""
    made, _ = scene

    def off(summary):
        summary["comparison"][2]["measured"]["sent_bytes"] *= 0.57

    edited(run_folder, off)
    found = compare_run(run_folder, Band())
    assert found.is_within and line_of(found, OTHER).passes == {"sent_bytes": "less than 0.1% of the step"}
    said = " ".join(page_text(_page(found)).split())
    assert "no figure is outside, and 1 pass by an exception" in said and "every figure" not in said
    assert f"{OTHER} passes: bytes less than 0.1% of the step" in said
    made = replace(made, compute_seconds=0.0, step_seconds=0.0, all_reduce_seconds=0.0)
    made.save(run_folder / "plan.json")
    edited(run_folder, lambda summary: summary.update(step_seconds=9 * summary["step_seconds"]))
    step = line_of(compare_run(run_folder, Band()), "step")
    assert step.outside == () and step.passes == {"seconds": "forecast not known yet"}


def steps_of(folder, factors, ranks=(0, 1)):
    """A step for each factor, by which all that crossed took longer on those ranks."""
    trace = Trace.load(folder / "trace.json")
    for rank, records in enumerate(played := list(trace.ranks)):
        one = [record for record in records if record.step == 0]
        played[rank] = tuple(
            replace(record, step=step, seconds=(factor if rank in ranks else 1) * record.seconds)
            for step, factor in enumerate(factors)
            for record in one
        )
    Trace(tuple(played)).save(folder / "trace.json")


def line_of(found, name):
    return next(line for line in found.lines if line.group == name)


@pytest.mark.parametrize("lower", [1.1, 0.9])
def test_a_group_is_inside_whose_middle_half_reaches_the_band(run_folder, lower):
    """The median alone is outside."""
    steps_of(run_folder, [1.0, lower, 1 + 5 * (lower - 1), 1 + 5 * (lower - 1), 1 + 5 * (lower - 1)])
    found = compare_run(run_folder, Band())
    line = line_of(found, "bucket 0")
    assert abs(line.measured.seconds / line.forecast.seconds - 1) == pytest.approx(0.5)
    assert line.outside == () and found.is_within and line.passes == {"seconds": "between the quartiles"}
    low, high = sorted([lower, 1 + 5 * (lower - 1)])
    assert (line.middle.low, line.middle.high) == pytest.approx(
        (low * line.forecast.seconds, high * line.forecast.seconds)
    )
    assert outside(compare_run(run_folder, Band(seconds=0.05)))["bucket 0"] == ("seconds",)


def test_a_group_is_outside_whose_middle_half_does_not_reach_the_band(run_folder):
    """Though a quarter of its steps are as forecast."""
    steps_of(run_folder, [1.0, 1.3, 1.3, 1.4, 1.4])
    assert outside(compare_run(run_folder, Band()))["bucket 0"] == ("seconds",)


def test_a_rank_that_waits_for_the_other_is_no_slower(run_folder):
    steps_of(run_folder, [2.0, 2.0, 2.0], ranks=[0])
    assert compare_run(run_folder, Band()).is_within


def test_a_step_slower_than_its_forecast_is_outside(run_folder):
    edited(run_folder, lambda summary: summary.update(step_seconds=1.3 * summary["step_seconds"]))
    assert outside(compare_run(run_folder, Band())) == {"step": ("seconds",)}
    edited(run_folder, lambda summary: summary.update(step_seconds=1.03 / 1.3 * summary["step_seconds"]))
    assert compare_run(run_folder, Band()).is_within
    assert outside(compare_run(run_folder, Band(seconds=0.02))) == {"step": ("seconds",)}


def test_bytes_below_a_thousandth_of_the_step_are_let_pass(run_folder):
    def less(summary):
        summary["comparison"][2]["measured"]["sent_bytes"] = 0.0

    edited(run_folder, less)
    assert compare_run(run_folder, Band()).is_within
    assert outside(compare_run(run_folder, Band(sent_bytes=0)))[OTHER] == ("sent_bytes",)  # all of a band gone is all


@pytest.mark.parametrize("name", ["plan", "trace", "summary", "topology", "profile"])
def test_a_missing_file_is_named(run_folder, name):
    (run_folder / f"{name}.json").unlink()
    with pytest.raises(ValueError, match=rf"has no {name}.json; give the folder of a run that ended.*report\(folder\)"):
        compare_run(run_folder, Band())


def test_files_of_another_run_are_refused(run_folder, scene):
    made, case = scene
    plan(case.profile, case.topology, constraints={"t.weight": "all_reduce"}).save(run_folder / "plan.json")
    with pytest.raises(ValueError, match=r"not the plan of this run: they differ in t.weight by owned_rows"):
        compare_run(run_folder, Band())
    made.save(run_folder / "plan.json")
    model(dense("other", 3)).save(run_folder / "profile.json")
    with pytest.raises(ValueError, match=r"the profile is of .* give the profile.json that stands beside the plan"):
        compare_run(run_folder, Band())
    case.profile.save(run_folder / "profile.json")
    Trace(((Record(0, "strange", "AllReduce", 0.0, 1.0, 1.0),),)).save(run_folder / "trace.json")
    with pytest.raises(ValueError, match=r"trace.json has no request of any group of the plan"):
        compare_run(run_folder, Band())


def test_a_broken_file_is_named(run_folder):
    (run_folder / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"summary.json is no summary file: it lacks 'comparison'"):
        compare_run(run_folder, Band())


def test_a_band_is_a_share():
    with pytest.raises(ValueError, match="a band is a share between 0 and 1"):
        Band(seconds=15)


def test_the_topology_a_plan_is_compared_on_may_be_larger(run_folder):
    """A plan that was given to the run has its own number of workers."""
    larger = Topology.load(run_folder / "topology.json").of(8)
    larger.save(run_folder / "topology.json")
    assert compare_run(run_folder, Band()).is_within
