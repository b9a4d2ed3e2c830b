"""measure, simulate and compare on the command line: their files feed one another; what is wrong is said in one line.
One worker, in this process."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from armillary.cli.main import app
from armillary.plans import Link, Plan, Profile, Topology
from armillary.session.autotune import AHEAD, CHOSEN

SMALL = ("language_model", "--small")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A folder with a profile, hand-written machines of 8 workers, and a plan for both; measured once for all tests."""
    seen = tmp_path_factory.mktemp("once")
    files = ("--topology", f"{seen}/topology.json", "--profile", f"{seen}/profile.json")

    def run(*arguments):
        assert CliRunner().invoke(app, arguments).exit_code == 0

    run("measure", *SMALL, "--workers", "1", "--out", str(seen))
    link = Link(1e-4, 1e7)
    Topology(8, 1, link, link, 1 << 33).save(seen / "topology.json")
    run("plan", *SMALL, *files, "--out", f"{seen}/plan.json")
    return seen


@pytest.fixture
def planned(once, tmp_path):
    """A copy of it, below the folder that commands run in."""
    return shutil.copytree(once, tmp_path / "seen")


def test_what_measure_writes_is_what_plan_reads(armillary, tmp_path):
    code, out, err = armillary("measure", *SMALL, "--workers", "1", "--out", "seen")
    assert code == 0 and "measured memory: " in err
    assert "gather" in out and "worst residual" in out and "written: seen/topology.json, seen/profile.json" in out
    topology, profile = Topology.load(tmp_path / "seen/topology.json"), Profile.load(tmp_path / "seen/profile.json")
    files = ("--topology", "seen/topology.json", "--profile", "seen/profile.json")
    code, out, _ = armillary("plan", *SMALL, *files, "--json")
    planned = json.loads(out)
    assert code == 0 and planned["plan"]["topology_fingerprint"] == topology.fingerprint
    seconds = sum(stage.forward_seconds + stage.backward_seconds for stage in profile.stages)
    assert planned["plan"]["compute_seconds"] == pytest.approx(seconds)


def test_plan_lists_every_candidate_with_its_price_and_why_it_lost(armillary, planned):
    files = ("--topology", "seen/topology.json", "--profile", "seen/profile.json")
    _, out, _ = armillary("plan", *SMALL, *files)
    listed = [line for line in out[out.index("candidate for") :].splitlines() if line.startswith("embedding.weight")]
    found = json.loads(armillary("plan", *SMALL, *files, "--json")[1])
    mine = [one for one in found["candidates"] if one["candidate"]["parameter"] == "embedding.weight"]
    assert len(listed) == len(mine) > 5 and sum(line.endswith("chosen") for line in listed) == 1
    assert all(one["lost"] or one["candidate"]["choice"]["name"] in listed[place] for place, one in enumerate(mine))
    made = Plan.load(planned / "plan.json")
    (taken,) = [one["candidate"] for one in mine if not one["lost"]]
    assert made.group_of("embedding.weight").exchange.name == taken["choice"]["name"]
    assert all(one["candidate"]["forecast"]["seconds"] > 0 for one in mine)


def test_plan_lists_whole_plans_with_prefetch_and_without_by_their_simulated_step(armillary, planned):
    files = ("--topology", "seen/topology.json", "--profile", "seen/profile.json")
    _, out, _ = armillary("plan", *SMALL, *files)
    whole = json.loads(armillary("plan", *SMALL, *files, "--json")[1])["whole_plans"]
    seconds = [cost["seconds"] for cost in whole.values()]
    assert seconds == sorted(seconds) and seconds[0] > 0
    by_row = [name for name in whole if name.split("(")[0] == "owned_rows" and AHEAD not in name]
    assert by_row and all(name + AHEAD in whole for name in by_row)
    assert all(f"{name}  " in out for name in whole)
    played = json.loads(armillary("simulate", planned / "plan.json", "--json")[1])
    assert whole[CHOSEN]["seconds"] == pytest.approx(played["step_seconds"])


def test_measure_without_a_workload_prints_one_object(armillary, tmp_path):
    code, out, err = armillary("measure", "--workers", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["profile"] is None and found["topologies"][0]["processor"]["merge"]["row_seconds"] >= 0
    assert (tmp_path / "topology.json").is_file() and not (tmp_path / "profile.json").exists()


def test_a_profile_of_another_model_is_refused(armillary, refused):
    armillary("measure", *SMALL, "--workers", "1")
    files = ("--topology", "topology.json", "--profile", "profile.json")
    message = refused("plan", *SMALL, "--set", "width=6", *files, expected=1)
    assert "the profile is of model" in message and "measure again with this workload" in message


def test_a_plan_is_played_with_the_facts_beside_it(armillary, planned, tmp_path):
    code, out, _ = armillary("simulate", planned / "plan.json", "--out", "drawn")
    assert code == 0 and "step of 8 workers: " in out
    events = json.loads((tmp_path / "drawn/timeline.json").read_text())["traceEvents"]
    assert {"forward lstm", "backward lstm"} <= {event["name"] for event in events}
    code, out, _ = armillary("simulate", planned / "plan.json", "--json")
    found = json.loads(out)
    planned = Plan.load(planned / "plan.json")
    assert sum(found["sent_bytes"].values()) == pytest.approx(planned.forecast.sent_bytes)
    assert planned.compute_seconds < found["step_seconds"] <= planned.forecast.seconds * (1 + 1e-9)


def test_a_plan_is_played_for_any_number_of_workers_and_other_machines(armillary, planned, tmp_path):
    Topology(2, 4, Link(0.0, 1e9), Link(0.0, 1e9), 1 << 33).save(tmp_path / "fast.json")

    def seconds(*options):
        code, out, _ = armillary("simulate", planned / "plan.json", "--json", *options)
        assert code == 0
        found = json.loads(out)
        return found["workers"], found["step_seconds"]

    here, there, more = seconds(), seconds("--topology", "fast.json"), seconds("--workers", 1024)
    assert (here[0], there[0], more[0]) == (8, 8, 1024)
    assert there[1] < here[1] < more[1]


def test_a_workload_is_planned_and_played_over_assumed_links(armillary, tmp_path):
    code, out, err = armillary("simulate", *SMALL, "--workers", "16", "--gbit", "0.01", "--latency-us", "50")
    assert (code, err) == (0, "") and "step of 16 workers" in out
    assert (tmp_path / "timeline.json").is_file()


def test_one_command_draws_the_curves(armillary, tmp_path):
    code, out, _ = armillary("simulate", *SMALL, "--scaling", "--out", "curves")
    assert code == 0 and "1024" in out and "all_reduce everything" in out
    assert (tmp_path / "curves/scaling.png").read_bytes().startswith(PNG)
    kept = json.loads((tmp_path / "curves/scaling.json").read_text())
    assert [point["workers"] for point in kept["workloads"][0]["curves"][0]["points"]][-1] == 1024
    assert any("1 Gbit/s and 100 us a message" in line for line in kept["assumed"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("simulate",), "want a plan.json or a WORKLOAD; or --scaling"),
        (("simulate", "none.json"), "none.json is no plan file: there is none of that name"),
        (("simulate", "langauge_model"), "no workload 'langauge_model'"),
        (("simulate", *SMALL, "--workers", "0"), "--workers: want at least 1, got 0"),
        (("simulate", *SMALL, "--gbit", "0"), "bytes_per_second > 0"),
        (("compare", "none"), "none has no plan.json; give the folder of a run that ended"),
        (("compare", "none", "--seconds", "15"), "a band is a share between 0 and 1"),
        (("measure", "langauge_model", "--workers", "1"), "no workload 'langauge_model'"),
    ],
)
def test_bad_input_is_answered_with_what_is_wanted(refused, arguments, complaint):
    assert complaint in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--schedule", "ring"), "--exchange, --schedule, --edge, --edge-back: the plan in the file says its own"),
        (("--set", "width=6"), "--set, --small, --corpus, --data: the plan in the file is of its own workload"),
        (("--gbit", "1"), "--gbit, --latency-us: the links are those that stand beside the plan"),
        (("--latency-us", "5", "--topology", "seen/topology.json"), "the links are those of --topology; drop these"),
    ],
)
def test_what_a_plan_in_a_file_says_itself_is_not_taken_from_options(refused, planned, arguments, complaint):
    assert complaint in refused("simulate", planned / "plan.json", *arguments)


def test_curves_are_drawn_of_the_workload_with_its_options_and_refuse_what_has_no_effect(
    armillary, refused, planned, tmp_path
):
    kept = {}
    for name, options in (("usual", ()), ("wide", ("--set", "width=64"))):
        asked = ("simulate", *SMALL, *options, "--scaling", "--workers", "8", "--gbit", "0.001", "--out", name)
        assert armillary(*asked)[0] == 0
        (kept[name],) = json.loads((tmp_path / name / "scaling.json").read_text())["workloads"]
    usual, wide = (kept[name]["curves"][1]["points"][-1]["exposed_seconds"] for name in ("usual", "wide"))
    assert wide > 2 * usual  # more is sent
    assert "name it, or drop them" in refused("simulate", "--scaling", "--set", "width=6")
    assert "drop --profile" in refused("simulate", *SMALL, "--scaling", "--profile", planned / "profile.json")


def test_a_plan_is_made_for_as_many_workers_of_the_machines_as_are_asked_for(armillary, planned):
    files = ("--topology", "seen/topology.json", "--profile", "seen/profile.json")
    made = json.loads(armillary("plan", *SMALL, *files, "--workers", "16", "--json")[1])
    assert (made["topology"]["nodes"], Plan.from_json(json.dumps(made["plan"])).workers) == (16, 16)
    assert Plan.load(planned / "plan.json").workers == 8


def test_a_plan_alone_is_told_what_it_lacks(armillary, refused, planned):
    (planned / "profile.json").unlink()
    (planned / "plan.profile.json").unlink()
    assert "no plan.profile.json or profile.json stands beside" in refused("simulate", planned / "plan.json")
    armillary("measure", *SMALL, "--workers", "1", "--set", "width=6", "--out", "other")
    message = refused("simulate", planned / "plan.json", "--profile", "other/profile.json")
    assert "the plan was made for model" in message


def test_compare_says_of_every_group_how_near_the_forecast_came(armillary, tmp_path):
    assert armillary("train", *SMALL, "--workers", "1", "--steps", "3", "--name", "run")[0] == 0
    code, out, err = armillary("compare", "runs/run", "--json")
    found = json.loads(out)
    assert err == "" and code == (0 if found["is_within"] else 3)
    planned = Plan.load(tmp_path / "runs/run/plan.json")
    assert [line["group"] for line in found["lines"]] == [*(group.name for group in planned.groups), "step", "process"]
    code, out, _ = armillary("compare", "runs/run", "--sent", "1", "--memory", "1", "--seconds", "1")
    assert code == 0 and "every figure is within its band" in out
    code, out, _ = armillary("compare", "runs/run", "--sent", "0", "--memory", "0", "--seconds", "0")
    assert code == 3 and "outside their bands; the last column names them." in " ".join(out.split())
