"""Curves against time: clocks and goals by hand, what counts as learning alike, a model with sparse gradients."""

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.measuring.bars import missed
from benchmarks.netlab.asking import ask, granting
from benchmarks.parallax.curves import draw
from benchmarks.parallax.race import Goal, Race, Turn, apart, load, points, reached, save
from benchmarks.parallax.standings import ROUNDING, bars, table
from benchmarks.parallax.tasks import TASKS
from benchmarks.peers.sparse import PLAIN_NAMES

from armillary.workloads import language_model, translation

PERPLEXITY, BLEU = Goal("perplexity", 100.0, rises=False), Goal("bleu", 0.2, rises=True)
WORKLOADS = {"language_model": language_model, "translation": translation}
CONDITIONS = {
    "task": "w", "precision": "float32", "workload": {"width": 8}, "workers": 2,
    "Mbit/s": 100.0, "optimizer": "Adagrad", "machine": "m",
    "bucket MiB": 2.0, "load before": 0.1, "plan": {"table": "owned_rows", "head": "all_reduce"},
}  # fmt: skip


def curve(seconds, values, metric="perplexity", losses=((4.0, 3.0), (5.0, 2.0))):
    """Two ranks, two steps a turn."""
    return tuple(Turn(spent, 3e6, losses, {metric: value}) for spent, value in zip(seconds, values, strict=True))


SLOW, FAST = curve([4.0, 4.0, 4.0], [300, 100, 80]), curve([2.0, 3.0, 2.0], [300, 100, 80])
RACE = Race(CONDITIONS, PERPLEXITY, (), {"ddp_sparse": SLOW, "planned": FAST})


def test_a_clock_adds_up_the_turns_until_the_first_evaluation_that_meets_the_goal():
    assert [(point.step, point.seconds) for point in points(FAST)] == [(2, 2.0), (4, 5.0), (6, 7.0)]
    point = reached(FAST, PERPLEXITY)
    assert point is not None and (point.step, point.seconds, point.metrics["perplexity"]) == (4, 5.0, 100)
    assert reached(FAST[:1], PERPLEXITY) is None


def test_perplexity_falls_to_its_target_and_bleu_rises():
    point = reached(curve([1, 1, 1], [0.0, 0.25, 0.1], "bleu"), BLEU)
    assert point is not None and (point.step, point.metrics["bleu"]) == (4, 0.25)


def test_sides_are_apart_by_the_worst_loss_of_any_rank_at_any_step():
    other = curve([1, 1, 1], [1, 1, 1], losses=((4.0, 3.0), (5.0, 2.1)))
    assert apart(SLOW, SLOW) == 0 and apart(other, SLOW) == pytest.approx(0.05)


def test_a_side_that_learns_otherwise_or_stops_short_is_named():
    assert [bar.verdict for bar in bars(RACE)] == ["pass"] * 3
    off = curve([1, 1, 1], [300, 100, 80], losses=((4.0, 3.0), (5.0, 2.0 * (1 + 2 * ROUNDING))))
    (said,) = missed(bars(replace(RACE, curves={"ddp_sparse": SLOW, "planned": off})))
    assert said.says == "w, float32: digits that losses of planned share with those of ddp_sparse, worst step"
    assert said.wanted == "4.0 or more" and said.figures == [pytest.approx(4 - math.log10(2))]
    late = (*SLOW, replace(SLOW[-1], losses=((4.0, 3.0), (5.0, 2.001))))
    (said,) = missed(bars(replace(RACE, curves={"ddp_sparse": (*SLOW, SLOW[-1]), "planned": late})))
    assert said.figures == [pytest.approx(-math.log10(5e-4))]
    short = replace(RACE, goal=replace(PERPLEXITY, target=70.0))
    assert [bar.says for bar in missed(bars(short))] == [
        f"w, float32: {name} reaches the target (1: it does)" for name in RACE.curves
    ]


def test_double_precision_has_a_bar_as_much_higher():
    near = curve([1, 1, 1], [300, 100, 80], losses=((4.0, 3.0), (5.0, 2.0 * (1 + ROUNDING / 2))))
    race = replace(RACE, curves={"ddp_sparse": SLOW, "planned": near})
    double = replace(race, conditions={**CONDITIONS, "precision": "float64"})
    assert missed(bars(race)) == [] and [bar.wanted for bar in missed(bars(double))] == ["12.7 or more"]


def test_the_table_says_seconds_to_the_target_and_their_ratio():
    said = table(RACE)
    assert "| ddp_sparse | 4 | 8.0 | 1.00 | 2000 | 1.50 | perplexity 100 | 0.0e+00, 0.0e+00 |" in said
    assert "| planned | 4 | 5.0 | 1.60 | 1000 | 1.50 | perplexity 100 | 0.0e+00, 0.0e+00 |" in said
    assert "DDP's buckets: 2 MiB. Planned: table by owned_rows, the rest by all_reduce." in said
    assert "not reached | 7.0 so far | -" in table(replace(RACE, goal=replace(PERPLEXITY, target=70.0)))


def test_what_is_drawn_is_every_side_against_steps_and_against_seconds_for_every_metric():
    both = tuple(replace(turn, metrics={**turn.metrics, "bleu": 0.1}) for turn in SLOW)
    race = replace(RACE, beside=("bleu",), curves={"ddp_sparse": both, "planned": both})
    steps, seconds = [2, 4, 6], [[4.0, 8.0, 12.0], [2.0, 5.0, 7.0]]
    plain, beside = draw({"w": RACE}).axes, draw({"w": race}).axes
    assert [[list(line.get_xdata()) for line in axes.lines[:2]] for axes in plain] == [[steps, steps], seconds]
    assert [list(axes.lines[0].get_ydata()) for axes in beside] == [[300, 100, 80]] * 2 + [[0.1, 0.1, 0.1]] * 2


def test_a_race_comes_back_from_its_file(tmp_path):
    race = replace(RACE, beside=("bleu",))
    save(race, tmp_path / "race.json")
    assert load(tmp_path / "race.json") == race


def test_sides_that_took_other_steps_are_no_race():
    with pytest.raises(ValueError, match="the same steps"):
        replace(RACE, curves={"ddp_sparse": SLOW, "planned": FAST[:2]})
    with pytest.raises(ValueError, match="the same steps"):
        Turn(1.0, 1.0, ((1.0,), (1.0, 2.0)), {})


def test_links_are_set_before_the_answer_comes_and_other_words_are_shown(tmp_path):
    """Words come in pieces that do not end where lines do."""
    done, shown = [], []
    watch = granting(lambda speed: done.append((speed, (tmp_path / "a").exists())), shown.append)
    for piece in ("step 1\nnetlab: li", f"nks, please: 2.5 {tmp_path}/", "a\nstep 2\n"):
        watch(piece)
    assert done == [(2.5, False)] and (tmp_path / "a").exists() and shown == ["step 1", "step 2"]
    with pytest.raises(FileExistsError, match="another path"):
        ask(0, tmp_path / "a")


@pytest.mark.parametrize("name", list(TASKS))
def test_the_model_with_sparse_gradients_is_the_same_model(name):
    """Loss and gradients; and its values under the plain model's names open in the plain model."""
    module = WORKLOADS[name]
    task = module.workload(**module.SMALL)
    batch = next(task.batches("train", 0, 1, 0))
    torch.manual_seed(0)
    plain = task.model()
    torch.manual_seed(0)
    sparse = TASKS[name].sparse(task.model())
    losses = [task.loss(model, batch) for model in (plain, sparse)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    wanted = {key: value.grad for key, value in plain.named_parameters()}
    found = {PLAIN_NAMES.get(key, key): value.grad for key, value in sparse.named_parameters()}
    assert sum(grad.is_sparse for grad in found.values()) == 2
    dense = {key: grad.to_dense() for key, grad in found.items()}
    torch.testing.assert_close(dense, {key: wanted[key] for key in dense})
    plain.load_state_dict({PLAIN_NAMES.get(key, key): value for key, value in sparse.state_dict().items()})


@pytest.mark.parametrize("name", list(TASKS))
def test_the_optimizer_of_a_task_takes_sparse_and_dense_gradients_alike(name):
    """To rounding: what torch does to rows is what it does to the whole table."""
    tables = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizers = [TASKS[name].optimizer([table]) for table in tables]
    for _ in range(3):
        gradient = torch.zeros(4, 3)
        gradient[[1, 3]] = torch.randn(2, 3)
        tables[0].grad, tables[1].grad = gradient, gradient.to_sparse(1)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch warns where nobody chose
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(*tables)
