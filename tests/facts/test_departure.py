"""Departures are words of one registry, each with a sentence that says so, in the registry's order."""

import pytest

from armillary.plans import DEPARTURES, EXACT
from armillary.plans.group import checked


def test_every_word_says_that_it_is_not_exact_and_no_word_says_that_it_is():
    assert all(meaning.startswith("NOT exact: ") for meaning in DEPARTURES.values())
    assert "exact" not in DEPARTURES and "NOT" not in EXACT


def test_words_come_in_one_order_each_once():
    assert checked(["lazy", "stale", "lazy"]) == ("stale", "lazy") and checked([]) == ()


def test_words_cannot_be_added_from_outside():
    with pytest.raises(TypeError):
        DEPARTURES["late"] = "NOT exact: late"


def test_a_word_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="departures: exact, late unknown; want some of stale, lazy, lossy"):
        checked(["late", "stale", "exact"])
