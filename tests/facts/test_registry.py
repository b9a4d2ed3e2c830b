"""A shelf finds its entries by itself, refuses a name twice, and answers a wrong name with the right ones."""

import sys
import textwrap

import pytest

from armillary.plans import Choice, Registry


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A package of two modules, each of which registers an entry as it is imported."""
    package = tmp_path / "shelf_for_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shelf.py").write_text(
        textwrap.dedent(
            """
            from armillary.plans import Registry

            FRUIT = Registry("fruit", "shelf_for_a_test")
            """
        )
    )
    for name in ("pear", "apple"):
        (package / f"{name}_file.py").write_text(
            f"from shelf_for_a_test.shelf import FRUIT\n\nFRUIT.register({name!r}, {name.upper()!r})\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    import shelf_for_a_test.shelf as module

    yield module.FRUIT
    for name in [name for name in sys.modules if name.startswith("shelf_for_a_test")]:
        del sys.modules[name]


def test_entries_are_found_when_somebody_first_looks_in_the_order_of_names(shelf):
    assert not any(name.endswith("_file") for name in sys.modules if name.startswith("shelf_for_a_test"))
    assert dict(shelf.all()) == {"apple": "APPLE", "pear": "PEAR"} and list(shelf.all()) == ["apple", "pear"]
    assert shelf["pear"] == "PEAR" and "apple" in shelf and "plum" not in shelf


def test_an_alias_stands_for_a_name_with_options_and_a_registered_name_outweighs_it(shelf):
    shelf.register("plum", "PLUM", aliases={"prune": {"is_dry": True, "grams": 5}, "pear": {}})
    assert shelf.named("prune") == Choice("plum", {"is_dry": True, "grams": 5})
    assert shelf.named("prune(grams=9)") == Choice("plum", {"is_dry": True, "grams": 9})
    assert shelf.named(Choice("pear", {"is_dry": True})) == Choice("pear", {"is_dry": True})
    assert shelf.named("fig") == Choice("fig") and "prune" not in shelf
    baskets = Registry("basket", "shelf_for_a_test")
    baskets.follow(shelf, lambda name, entry: f"a basket of {entry}")
    assert baskets.named("prune") == shelf.named("prune")


def test_a_wrong_name_is_answered_with_those_there_are_and_a_guess(shelf):
    with pytest.raises(ValueError, match=r"^fruit: no fruit 'aple'; there are apple, pear; did you mean 'apple'\?$"):
        shelf["aple"]
    with pytest.raises(ValueError, match=r"^fruit: no fruit 'zzz'; there are apple, pear; if it is your own, import"):
        shelf["zzz"]


def test_a_name_cannot_be_registered_twice_and_entries_cannot_be_changed_from_outside(shelf):
    shelf.register("kiwi", object())
    with pytest.raises(ValueError, match="fruit: 'kiwi' is registered twice; give one of them another name"):
        shelf.register("kiwi", object())
    assert shelf.register("pear", shelf["pear"]) == "PEAR"  # the same entry again, as a second import would do
    with pytest.raises(TypeError):
        shelf.all()["plum"] = "PLUM"


def test_another_shelf_has_entries_of_its_own():
    ours, theirs = Registry("colour", "armillary.plans"), Registry("colour", "armillary.plans")
    ours.register("red", 1)
    assert "red" in ours and "red" not in theirs


def test_a_shelf_follows_another_whatever_was_registered_first():
    leader, follower = Registry("colour", "armillary.plans"), Registry("paint", "armillary.plans")
    leader.register("red", 1)
    follower.follow(leader, lambda name, entry: f"{name} paint" if entry else None)
    leader.register("blue", 2)
    leader.register("blue", leader["blue"])  # the same again
    leader.register("none", 0)
    assert dict(follower.all()) == {"blue": "blue paint", "red": "red paint"} and "none" in leader
    follower.register("green", "green paint")
    for shelf, name in ((leader, "green"), (follower, "red")):
        with pytest.raises(ValueError, match=f"paint: '{name}' is registered twice"):
            shelf.register(name, 3)
    assert "green" not in leader
