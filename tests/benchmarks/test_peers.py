"""The arithmetic of the comparison with other frameworks: lines, ratios, floors, bars, and the truth to compute."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmarks.measuring.bars import Bar
from benchmarks.measuring.model import Sizes
from benchmarks.measuring.record import Block, Record
from benchmarks.peers import cases, lines, report, truth
from benchmarks.peers.heats import entries
from benchmarks.peers.run import mbit_of, whole

SIZES = Sizes(vocabulary=300, features=16, hidden=8, projection=4, sentences=4, words=5, negatives=32)
CONDITIONS = {"case": "made up", "workers": 2, "warm steps": 1, "timed steps": 1}


def block(mode: str, round: int, seconds: float, sent: float = 1e6, loss: float = 2.0) -> Block:
    return Block(
        mode=mode,
        round=round,
        step_seconds=(seconds,),
        wall_seconds=seconds,
        cpu_seconds=seconds,
        sent_bytes=(sent, sent / 2),
        received_bytes=(sent / 2, sent),
        peak_bytes=2**20,
        loss=loss,
    )


def record(seconds: Mapping[str, tuple[float, ...]], **others: float) -> Record:
    return Record(
        CONDITIONS, tuple(block(m, r, s, **others) for m, each in seconds.items() for r, s in enumerate(each))
    )


def found(case: str, mbit: float, *heats: Record) -> report.Found:
    return report.Found(case, mbit, "words", 10, (3.0, 2.0), {"fsdp2": "too slow"}, heats)


def judged(*all_found: report.Found) -> list[Bar]:
    """The bars that have a figure."""
    return [bar for bar in report.bars(all_found) if bar.figures]


def test_faster_is_taken_round_by_round():
    """The machine is half as fast in the second round; the ratio is not."""
    assert report.faster(record({"ours": (1, 2), "ddp": (3, 6)}), "ours", "ddp") == [3, 3]


def test_the_best_ddp_is_one_for_all_rounds_and_the_fastest_of_each_is_told_beside_it():
    seconds = {"ours": (1, 1, 1), "ddp": (3, 1, 2), "ddp_2mb": (1, 1.5, 4)}
    (bar,) = judged(found("dense", 0, record(seconds)))
    assert bar.figures == [1.5] and bar.verdict == "pass"
    assert "(ddp_2mb; 1.00 of the fastest of each round)" in bar.says
    (missed,) = judged(found("dense", 0, record({**seconds, "ddp_1mb": (2, 0.9, 0.9)})))
    assert missed.figures == [0.9] and missed.verdict == "**miss**"


@pytest.mark.parametrize(("alone", "over"), [(0.5, 4.0), (4.0, 1.0)])
def test_the_floor_is_the_larger_of_compute_and_bytes_over_the_speed_reached(alone: float, over: float):
    """The link carries 1 MB in a second, so a step of 1 MB takes at least one."""
    one = record({"ours": (4.0,), "compute_only": (alone,), "link": (1.0,)})
    assert report.link_speed(one) == 1e6
    assert report.floors(one) == [over]


def test_a_contender_that_computes_something_else_is_named():
    agreeing, wrong = record({"ours": (1,)}), record({"ddp": (1,)}, loss=2.1)
    assert report.strays(found("lm2", 100, agreeing)) == []
    (said,) = report.strays(found("lm2", 100, agreeing, wrong))
    assert "ddp" in said and "ours" not in said


def test_a_loss_that_is_no_number_agrees_with_nothing():
    assert report.strays(found("lm2", 100, record({"ours": (1,)}, loss=float("nan"))))


def test_nobody_asks_what_exchanges_nothing_for_its_loss():
    assert report.strays(found("lm2", 100, record({"compute_only": (1,), "link": (1,)}, loss=9.0))) == []


def test_bars_of_the_large_case_hold_and_fail_at_their_limits():
    def at(factor: float) -> list[str]:
        fast = record(
            {"ours": (1.0,), "compute_only": (0.5,), "link": (factor,), "ddp_sparse": (3.4 * factor,)}
            | {"torchrec_by_hand": (1.35 * factor,)}
        )
        others = record({"ours": (1.0,), "horovod_sparse": (5 * factor,)})
        return [bar.verdict for bar in judged(found("lm8", 100, fast, others))]

    assert at(1.001) == ["pass"] * 4
    assert at(0.7) == ["**miss**"] * 4


def test_a_bar_whose_contenders_did_not_meet_is_not_measured():
    bars = report.bars([found("lm8", 1000, record({"ours": (1.0,), "compute_only": (0.5,)}))])
    assert [bar.figures for bar in bars if bar.figures] == [[2.0]]
    assert {bar.verdict for bar in bars} == {"**miss**", "not measured"}
    assert len(bars) == len(report.bars([]))


def test_horovod_meets_both_plans_of_ours_and_scrambled_ids_are_asked_for_where_they_ran():
    fast = record({"ours": (1.0,), "compute_only": (0.5,), "link": (1,), "ddp_sparse": (4,), "torchrec_by_hand": (2,)})
    slow = record({"ours": (1.0,), "ours_ahead": (0.8,), "horovod_merged": (4.5,)})
    orders = record({"ours": (1.0,), "ours_scrambled": (0.9,)})
    bars = {bar.says.partition(": ")[2]: bar for bar in judged(found("lm8", 100, fast, slow, orders))}
    plain, ahead = (bars[f"{mode}, times as fast as horovod_merged"] for mode in report.OURS)
    order = bars["ours, times as fast as ours_scrambled"]
    assert [bar.figures for bar in (plain, ahead, order)] == [[4.5], [4.5 / 0.8], [0.9]]
    assert [bar.verdict for bar in (plain, ahead, order)] == ["**miss**", "pass", "**miss**"]


def test_bars_of_dense_models_ask_for_the_best_buckets_and_the_default():
    one = record({"ours": (1.0,), "ddp": (1.3,), "ddp_2mb": (0.9,), "ddp_5mb": (1.1,)})
    best, default = judged(found("dense", 1000, one))
    assert (best.figures, best.verdict, default.figures, default.verdict) == ([0.9], "**miss**", [1.3], "pass")
    assert len(judged(found("dense", 0, one))) == 1


def test_a_table_has_a_row_for_everyone_and_a_reason_for_the_rest():
    shown = report.table(found("lm2", 100, record({"ours": (1.0,), "ddp": (2.0,)})))
    assert "| ddp | 10 | 2000 (2000-2000) | 2.00 (2.00-2.00) | 0.75 (1.00) |" in shown
    assert "- fsdp2: too slow." in shown and "how they were scheduled is not kept" in shown


def test_a_contender_that_ran_without_any_other_has_no_table():
    shown = report.table(found("lm2", 100, record({"ours": (1.0,)}), record({"ddp": (2.0,), "fsdp2": (3.0,)})))
    assert "| ours |" not in shown and "| ddp | 10 | 2000 (2000-2000) | - |" in shown


def test_what_was_found_comes_back_from_json(tmp_path: Path):
    one = record({"ours": (1.0, 2.0), "ddp": (2.0, 3.0)})
    fields = {"case": "lm2", "Mbit/s": 100, "unit": "words", "samples": 10, "truth": [3.0, 2.0]}
    path = tmp_path / "lm2.json"
    path.write_text(json.dumps({**fields, "refused": {"fsdp2": "too slow"}, "heats": [asdict(one)]}))
    assert report.load(path) == found("lm2", 100, one)


def test_heats_of_a_case_are_one_record_whichever_job_ran_them():
    told = {"case": "lm8", "Mbit/s": 100.0, "unit": "words", "samples": 640}
    first = {**told, "truth": [3.0, 2.0], "refused": {"ddp": "too slow"}, "heats": ["a", "b"]}
    second = {**told, "truth": [3.0, 2.0, 1.0], "refused": {"fsdp2": "missing"}, "heats": ["c"]}
    empty = {**told, "truth": [3.0], "refused": {}, "heats": []}
    refused = {"ddp": "too slow", "fsdp2": "missing"}
    assert whole([first, empty, second]) == {**second, "refused": refused, "heats": ["a", "b", "c"]}
    assert entries()["lm8"].only(1).heats == (entries()["lm8"].heats[1],)


ONE_PROCESS = """
import torch

def train(case):
    model = case.model()
    return loop(model)
"""
CHANGED = '''
import torch
import fast
import unused

WAYS = {"a": 1}

class Wrapped(torch.nn.Module):
    """A line that does not count."""
    size = 3

def train(case):
    """Nor does this one."""
    model = Wrapped(case.model(),  # nor this
                    fast.ways(WAYS))
    return loop(model)

def other():
    return 1
'''


def test_lines_are_those_that_the_one_process_program_does_not_have():
    """import torch; import fast; WAYS; class Wrapped; size; model = ...: not what is unused, said, or as it was."""
    theirs, plain = (lines.program(source, "train") for source in (CHANGED, ONE_PROCESS))
    assert lines.counted(theirs, plain) == 6
    assert lines.counted(plain, plain) == 0


def test_a_program_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"no 'trian' in this file; there are .*train"):
        lines.program(ONE_PROCESS, "trian")


def test_every_contender_with_a_program_has_its_lines():
    assert all(lines.changed_lines(name) > 0 for name in lines.PROGRAMS)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_one_process_is_one_step_of_the_mean_gradient(tmp_path: Path):
    """The truth's second loss, by hand: gradients of each worker's batch apart, then their mean."""
    cases.write_start(SIZES, tmp_path)
    case = cases.lm(SIZES, 2, 1000, tmp_path)
    model = case.model()
    parameters = list(model.parameters())
    streams = [case.draw(rank) for rank in range(2)]
    gradients = [torch.autograd.grad(case.loss(model, next(stream)), parameters) for stream in streams]
    with torch.no_grad():
        for parameter, one, other in zip(parameters, *gradients, strict=True):
            parameter -= case.options["lr"] * (one + other) / 2
    second = float(case.loss(model, next(streams[0])).detach())
    assert truth.losses(case, 2, 2)[1] == pytest.approx(second, rel=1e-5)


def test_every_model_of_a_case_begins_alike_whatever_another_has_learned(tmp_path: Path):
    cases.write_start(SIZES, tmp_path)
    case = cases.lm(SIZES, 2, 1000, tmp_path)
    own, sparse, lent = (list(make().parameters()) for make in (case.model, case.sparse_model, case.borrowed))
    with torch.no_grad():
        own[0].add_(1)
    again = list(case.model().parameters())
    assert all(map(torch.equal, again, sparse)) and all(map(torch.equal, again, lent))
    assert not torch.equal(own[0], again[0])


def test_whole_tables_are_refused_where_a_step_of_them_would_take_seconds(tmp_path: Path):
    """2 x 2 x 400,000 x 256 x 4 x 7/8 bytes are 1.43 GB: 115 s at 100 Mbit/s."""
    refused = cases.lm(Sizes(), 8, 100, tmp_path).refused
    assert "1.43 GB" in refused["ddp"] and "115 s" in refused["fsdp2"] and "ddp_sparse" not in refused
    assert not cases.lm(SIZES, 2, 1000, tmp_path).refused


def test_a_heat_without_anyone_left_is_not_run():
    heats = entries()["lm8"].heats
    left_out = {name for heat in heats[1:] for name in heat.names}
    kept = entries()["lm8"].without(left_out)
    assert [heat.names for heat in kept] == [tuple(name for name in heats[0].names if name not in left_out)]


def test_rates_are_read_as_they_are_written():
    assert (mbit_of("100mbit"), mbit_of("1gbit"), mbit_of("0mbit")) == (100, 1000, 0)
    with pytest.raises(ValueError, match="no rate '1 Gbit/s'"):
        mbit_of("1 Gbit/s")
