"""Parallax's partition search, held against the measurements its authors left in their code."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.planning.partition_search import CostModel, Trial, best_partitions, fit, search

# Words per second by number of partitions: parallax/find_num_partitons2.py on the branch partitions_exp, Sept 2018.
LM = {2: 62_291, 4: 109_056, 8: 190_609, 16: 279_107, 32: 299_567, 64: 303_882, 128: 286_200}
NMT = {2: 105_720, 4: 119_880, 8: 128_160, 16: 133_080, 32: 130_680}
LM_WORDS = 122_880  # an iteration: 48 GPUs x 128 sentences x 20 words


def trials(words_per_second, words=LM_WORDS):
    return [Trial(partitions, words / speed) for partitions, speed in words_per_second.items()]


def errors(model, measured):
    return [abs(model.seconds(trial.partitions) / trial.seconds - 1) for trial in measured]


def test_the_language_model_wants_48_partitions():
    model = fit(trials(LM))
    assert model == pytest.approx((0.226, 3.491, 0.001496), rel=2e-3)
    assert best_partitions(model, 2, 128) == 48
    assert min(errors(model, trials(LM))) > 0.001 and max(errors(model, trials(LM))) < 0.0685


def test_the_five_points_a_search_would_see_say_51():
    seen = trials({partitions: speed for partitions, speed in LM.items() if partitions >= 8})
    model = fit(seen)
    assert best_partitions(model, 8, 128) == 51
    assert min(errors(model, seen)) > 0.0155 and max(errors(model, seen)) < 0.0655


def test_translation_wants_19_partitions():
    model = fit(trials(NMT))
    assert best_partitions(model, 2, 32) == 19
    assert max(errors(model, trials(NMT))) < 0.009


def test_the_search_tries_what_parallax_would_and_chooses_51():
    found = search(lambda partitions: LM_WORDS / LM[partitions], start=8, fewest=8, most=128)
    assert [trial.partitions for trial in found.trials] == [8, 16, 32, 64, 128]
    assert found.chosen == 51


def test_the_search_halves_when_doubling_does_not_help():
    seconds = {16: 5.0, 32: 6.0, 8: 4.0, 4: 3.0, 2: 3.5, 1: 0.0}
    asked = []
    found = search(lambda partitions: asked.append(partitions) or seconds[partitions], start=16)
    assert asked == [16, 32, 8, 4, 2]
    assert 2 <= found.chosen <= 32


@given(st.floats(0, 10), st.floats(0.01, 100), st.floats(1e-4, 1), st.integers(1, 64))
def test_a_search_over_times_that_obey_the_model_finds_its_optimum(theta0, theta1, theta2, start):
    """P* = sqrt(theta1 / theta2), in whole numbers."""
    model = CostModel(theta0, theta1, theta2)
    found = search(model.seconds, start, fewest=1, most=4096)
    best = model.seconds(best_partitions(model, 1, 4096))
    assert model.seconds(found.chosen) == pytest.approx(best, rel=1e-3)


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_no_partition_is_fitted_to_run_faster_for_its_own_cost(seconds):
    model = fit([Trial(1 << power, one) for power, one in enumerate(seconds)])
    assert model.theta1 >= 0 and model.theta2 >= 0


def test_what_cannot_run_at_first_is_doubled_until_it_can_and_never_halved_again():
    found = search(lambda partitions: math.inf if partitions < 8 else 1 / partitions + partitions / 400, 2, 1, 64)
    assert [trial.partitions for trial in found.trials] == [2, 4, 8, 16, 32]
    assert found.chosen == 20


def test_with_fewer_than_three_trials_the_best_of_them_is_taken():
    found = search(lambda partitions: float(partitions), start=1, most=2)
    assert (found.chosen, found.model) == (1, None)
    assert [trial.partitions for trial in found.trials] == [1, 2]


def test_the_log_shows_measured_beside_fitted():
    found = search(lambda partitions: 1e-3 * {1: 4, 2: 3, 4: 4}[partitions], start=1, most=4)
    lines = str(found).splitlines()
    assert lines[0] == "partitions  measured ms  fitted ms"
    assert lines[2] == "         2        3.000      3.000 <- chosen"
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: fit([Trial(1, 1.0), Trial(2, 1.0)]), "3 numbers of partitions or more"),
        (lambda: fit([Trial(1, 1.0), Trial(2, 1.0), Trial(4, math.inf)]), "finite seconds"),
        (lambda: search(lambda _: 1.0, start=4, most=2), "fewest <= start <= most, got 1, 4, 2"),
        (lambda: search(lambda _: math.inf, start=1, most=4), r"none of \[1, 2, 4\] could run"),
    ],
)
def test_nonsense_is_refused(act, said):
    with pytest.raises(ValueError, match=said):
        act()


@pytest.mark.parametrize(
    ("start", "most", "tried"),
    [(1, 2, [1, 2]), (1, 3, [1, 2, 3]), (1, 8, [1, 2, 4]), (8, 8, [2, 4, 8]), (2, 6, [1, 2, 4])],
)
def test_three_numbers_are_tried_for_a_fit_where_there_are_so_many(start, most, tried):
    """The time rises with the first step in any direction, so a search that only follows a fall would end with two."""
    found = search(lambda partitions: 1.0 + abs(partitions - start), start=start, most=most)
    assert [trial.partitions for trial in found.trials] == tried
    assert (found.model is None) == (len(tried) < 3)


def test_all_the_workers_are_tried_where_doubling_misses_them():
    found = search(lambda partitions: 1 / partitions, start=1, most=6)
    assert [trial.partitions for trial in found.trials] == [1, 2, 4, 6] and found.chosen == 6
