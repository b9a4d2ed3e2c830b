"""The tables of Parallax in small: rates and ratios by hand, the constructed model's sparsity, the plans compared."""

from dataclasses import replace

import pytest
import torch
from benchmarks.measuring.bars import missed
from benchmarks.measuring.record import Block, Record
from benchmarks.parallax.constructed import VOCABULARY, workload
from benchmarks.parallax.modes import double, plans
from benchmarks.parallax.tables import RIVALS, ablation, bars, noise, rate, scaling, sweep

from armillary import Link, Topology, assumptions_of, plan, profile


def record(**seconds):
    """Three rounds of every mode; `seconds` of each."""
    blocks = [
        Block(mode, index, (spent,), spent, spent, (1.0,), (1.0,), 1, 0.0)
        for mode, spents in seconds.items()
        for index, spent in enumerate(spents)
    ]
    conditions = {
        "workload": "w", "unit": "words", "samples": 100.0, "workers": 4, "alpha": 0.25, "planned": "t by owned_rows"
    }  # fmt: skip
    return Record(conditions, tuple(blocks))


EVEN = record(
    all_reduce=[0.2, 0.4, 0.2], owned=[0.1, 0.2, 0.1], planned=[0.1, 0.2, 0.1], planned_again=[0.11, 0.22, 0.11]
)


def late_at(records):
    """Of the bars that are missed, the figures."""
    return {bar.says.partition(":")[0]: bar.figures[0] for bar in missed(bars(records))}


def test_a_rate_is_of_all_workers_over_the_median_step():
    assert rate(EVEN, "all_reduce") == pytest.approx(2000) and rate(EVEN, "planned") == pytest.approx(4000)


def test_a_plan_is_held_against_the_better_of_the_two_round_by_round():
    late = record(all_reduce=[0.3] * 3, owned=[0.1] * 3, planned=[0.12] * 3, planned_again=[0.12] * 3)
    assert noise(EVEN) == pytest.approx(0.1) and noise(late) == 0
    assert late_at({"sweep_30": EVEN}) == {}
    assert late_at({"sweep_30": EVEN, "sweep_1": late}) == {"length 1": pytest.approx(0.1 / 0.12)}
    swapped = record(all_reduce=[0.1] * 3, owned=[0.3] * 3, planned=[0.12] * 3, planned_again=[0.12] * 3)
    assert [*late_at({"sweep_120": swapped})] == ["length 120"]
    assert [bar.verdict for bar in bars({"sweep_120": EVEN})] == ["pass", *["not measured"] * 6]


def test_a_plan_that_differs_from_itself_as_much_is_not_called_slower():
    shaky = record(all_reduce=[0.3] * 3, owned=[0.1] * 3, planned=[0.11] * 3, planned_again=[0.125] * 3)
    assert late_at({"sweep_30": shaky}) == {}


def test_a_plan_that_is_one_of_the_two_is_held_against_the_other_alone():
    spent = {"all_reduce": [0.1] * 3, "planned": [0.12] * 3, "planned_again": [0.12] * 3}
    same = {"planned is": "all_reduce"}
    faster, later = record(**spent, owned=[0.3] * 3), record(**spent, owned=[0.11] * 3)
    found = {
        name: Record({**one.conditions, **same}, one.blocks) for name, one in (("sweep_1", faster), ("sweep_4", later))
    }
    assert late_at(found) == {"length 4": pytest.approx(0.11 / 0.12)}
    assert "| 0.833 | 1.000 | t by owned_rows (this is all_reduce) |" in sweep({"sweep_1": found["sweep_1"]})


def test_tables_name_what_they_hold():
    assert "| 30 | 0.25 | 2,000 | 4,000 | 4,000 | 1.000 | 1.100 | t by owned_rows |" in sweep({"sweep_30": EVEN})
    assert "| w, words/s | 2,000 | 4,000 | 4,000 | 3,636 |" in ablation({"a": EVEN})
    assert "| w, words/s | 4 | 2,000 | - | 4,000 |" in scaling({"a": EVEN})


@pytest.mark.parametrize(("length", "alpha"), [(120, 1.0), (30, 0.25), (1, 1 / 120)])
def test_a_batch_reads_exactly_its_share_of_either_table(length, alpha):
    words, targets = next(workload(length=length).batches("train", 1, 4, 0))
    assert words.shape == targets.shape == (128, length)
    assert len(words.unique()) == len(targets.unique()) == round(alpha * VOCABULARY)


def test_the_plans_of_the_ablation_do_what_their_names_say():
    task = workload(length=1, width=2, hidden=2)
    torch.manual_seed(0)
    batches = [next(task.batches("train", worker, 4, 0)) for worker in range(4)]
    seen, link = profile(task.model(), batches, task.loss, workers=4, workers_per_node=2), Link(1e-4, 1e8)
    topology = Topology(2, 2, link, link, 1 << 40)
    sgd = torch.optim.SGD(task.model().parameters(), lr=0.1)
    found = plans(seen, topology, plan(seen, topology, assumptions=assumptions_of(sgd)), sgd)
    by = {name: {str(group.exchange.name) for group in one.groups} for name, one in found.items()}
    assert by["all_reduce"] == {"all_reduce"} and by["owned_dense"] == by["owned_dense_local"] == {"owned_dense"}
    assert by["owned"] == {"owned_rows", "owned_dense"} and by["hybrid"] == {"owned_rows", "all_reduce"}
    assert all(group.exchange.options["local_aggregation"] for group in found["owned_dense_local"].groups)
    assert found["planned"] == found["planned_again"]
    chosen = {**found, "planned": replace(found["owned"], compute_seconds=1.0)}
    assert double(chosen, "planned", RIVALS) == "owned" and double(chosen, "planned", ["all_reduce", "none"]) == ""
    assert double({**chosen, "planned": replace(found["owned"], mean="weights")}, "planned", RIVALS) == ""
    alone = Topology(1, 1, link, link, 1 << 40)
    assert list(plans(seen, alone, found["planned"], sgd)) == ["all_reduce", "planned", "planned_again"]
