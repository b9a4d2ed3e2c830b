"""BLEU by hand, and its sums add up."""

import math

import pytest

from armillary.workloads import translation as bleu

REFERENCE = [5, 6, 7, 8, 9, 10]


def test_a_perfect_translation_scores_one_and_a_wrong_one_zero():
    assert bleu.score(bleu.counts(REFERENCE, REFERENCE, never=1)) == 1
    assert bleu.score(bleu.counts([11] * 6, REFERENCE, never=1)) == 0
    assert bleu.score(bleu.counts([], REFERENCE, never=1)) == 0


def test_it_is_the_geometric_mean_of_the_precisions_times_brevity():
    sums = bleu.counts([5, 6, 7, 8, 11], REFERENCE, never=1)
    precisions = [4 / 5, 3 / 4, 2 / 3, 1 / 2]
    assert bleu.score(sums) == pytest.approx(math.exp(1 - 6 / 5) * math.prod(precisions) ** 0.25)


def test_repeating_a_right_word_matches_only_as_often_as_the_reference_has_it():
    assert bleu.counts([5, 5, 5, 6], [5, 5, 6], never=1)["matches_1"] == 3


def test_unknown_words_match_nothing_even_unknown_ones():
    sums = bleu.counts([5, 1, 6], [5, 1, 6], never=1)
    assert (sums["matches_1"], sums["ngrams_1"]) == (2, 3)
    assert sums["matches_2"] == 0


def test_scores_of_sums_weigh_sentences_by_length():
    one, other = bleu.counts(REFERENCE, REFERENCE, 1), bleu.counts([11] * 60, [12] * 60, 1)
    both = {name: one[name] + other[name] for name in one}
    assert bleu.score(both) < 0.1
