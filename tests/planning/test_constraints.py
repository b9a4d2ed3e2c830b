"""What the user demands is done, or refused with the reason; nothing is ignored."""

import pytest

from armillary.planning.planner import explain, plan
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.plans import Choice
from planning_cases import dense, machines, model, table

MODEL = model(
    table("embedding.weight", 3, alpha=0.001, aliases=("tied.weight",)),
    table("output.weight", 1, alpha=0.001),
    table("normed.weight", 4, refusals=("max_norm renormalises rows in forward",)),
    dense("head.weight", arrival=0),
    dense("both.weight", arrival=2, reads="both"),
    dense("cold.weight", arrival=None, requires_grad=False),
)
LINKS = machines(4, megabits=100)


def exchange_of(name, **constraints):
    return plan(MODEL, LINKS, constraints=constraints).group_of(name).exchange


@pytest.mark.parametrize(
    ("demanded", "layout", "exchange"),
    [
        ("replicated", "replicated", "gather_rows"),
        ("row_sharded", "row_sharded", "owned_rows"),
        ("all_reduce", "replicated", "all_reduce"),
        ("gather_rows", "replicated", "gather_rows"),
        ("owned_rows", "row_sharded", "owned_rows"),
        ("owned_rows_by_node", "row_sharded", "owned_rows_by_node"),
        ("owned_dense", "replicated", "owned_dense(owner=0)"),
        (Choice("owned_rows", {"owners": 3}), "row_sharded", "owned_rows(owners=3)"),
        (Choice("owned_dense", {"owner": 2}), "replicated", "owned_dense(owner=2)"),
        (Choice("owned_rows", {"order": "hashed"}), "row_sharded", "owned_rows(order=hashed)"),
        ("owned_rows(order=hashed)", "row_sharded", "owned_rows(order=hashed)"),
        (Choice("row_sharded"), "row_sharded", "owned_rows"),
    ],
    ids=str,
)
def test_a_constraint_is_honoured(demanded, layout, exchange):
    made = plan(MODEL, LINKS, constraints={"embedding.weight": demanded})
    group = made.group_of("embedding.weight")
    assert (group.layout, str(group.exchange)) == (layout, exchange)
    assert f"by constraint {demanded}" in group.reason
    assert sorted(made.parameters) == sorted(fact.name for fact in MODEL.parameters if fact.requires_grad)


def test_a_pattern_means_every_trainable_parameter_it_matches():
    made = plan(MODEL, LINKS, constraints={"*": "replicated"})
    assert {group.layout for group in made.groups} == {"replicated"}


def test_a_pattern_that_wants_rows_spread_means_every_table_that_can_be():
    made = plan(MODEL, LINKS, constraints={"*": "row_sharded", "output.weight": "replicated"})
    assert {group.name for group in made.groups if group.layout == "row_sharded"} == {"embedding.weight"}
    made = plan(MODEL, machines(1), constraints={"*": "row_sharded"})  # on one worker, too
    assert {group.name for group in made.groups if group.layout == "row_sharded"} == {
        "embedding.weight",
        "output.weight",
    }


def test_a_name_outweighs_a_pattern():
    made = plan(MODEL, LINKS, constraints={"embedding.weight": "owned_rows", "*.weight": "all_reduce"})
    assert made.group_of("embedding.weight").exchange.name == "owned_rows"
    assert made.group_of("output.weight").exchange.name == "all_reduce"


def test_an_alias_is_a_name():
    assert exchange_of("embedding.weight", **{"tied.weight": "all_reduce"}) == Choice("all_reduce")


def test_naive_servers_get_whole_parameters_the_emptiest_first():
    sizes = [70, 30, 20, 60, 10]
    profile = model(*[dense(f"p{i}", size, i) for i, size in enumerate(sizes)], workers=2)
    made = plan(profile, machines(2), constraints={"*": "owned_dense"})
    assert [group.parameters for group in made.groups] == [(f"p{i}",) for i in range(5)]
    assert [group.exchange.options["owner"] for group in made.groups] == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        ({"embeding.weight": "replicated"}, r"names no parameter.*did you mean 'embedding.weight'"),
        ({"embedding.weigth": "replicated"}, r"did you mean 'embedding.weight'\?$"),
        ({"zzz": "replicated"}, r"names no parameter.*there are embedding.weight, tied.weight"),
        ({"*.bias": "replicated"}, r"'\*.bias' names no parameter"),
        ({"cold.weight": "replicated"}, "only frozen parameters"),
        ({"head.weight": "row_sharded"}, "'head.weight' cannot be row_sharded: it is read whole by mm"),
        ({"both.weight": "owned_rows"}, "'both.weight' cannot be owned_rows: it is read whole by mm"),
        ({"normed.weight": "gather_rows"}, "max_norm renormalises rows in forward"),
        ({"h*": "owned_rows"}, r"nothing that 'h\*' means can be owned_rows \(head.weight: it is read whole by mm\)"),
        ({"embedding.weight": "sharded"}, "'sharded', which is no layout and no exchange; there are replicated"),
        ({"embedding.weight": Choice("row_sharded", {"owners": 2})}, "no layout and no exchange"),
        ({"embedding.weight": "owned_rows(owners=2"}, "at its end, want"),
        (
            {"embedding.weight": Choice("owned_rows", {"ownners": 2})},
            "owned_rows refuses .*: it has no ownners; it may have owners, ",
        ),
        ({"embedding.weight": Choice("owned_rows", {"owners": 9})}, "9 owners among 4 workers; want 1 to 4"),
        ({"emb*": "replicated", "*.weight": "all_reduce"}, "'embedding.weight' is replicated by 'emb\\*' and all_red"),
    ],
    ids=str,
)
def test_a_constraint_that_cannot_be_honoured_is_refused_with_the_reason(constraints, said):
    with pytest.raises(ValueError, match=said):
        plan(MODEL, LINKS, constraints=constraints)


def test_lazy_names_are_checked_too():
    with pytest.raises(ValueError, match=r"did you mean 'output.weight'"):
        plan(MODEL, LINKS, lazy=["outptu.weight"])


def test_explain_says_which_candidates_a_constraint_forbids():
    verdicts = explain(Case(MODEL, LINKS), PlanRequest(constraints={"embedding.weight": "replicated"}))
    mine = [verdict for verdict in verdicts if verdict.candidate.parameter == "embedding.weight"]
    forbidden = [verdict.candidate for verdict in mine if verdict.lost == "constraint: replicated"]
    assert forbidden and all(one.is_row_sharded for one in forbidden)
    assert [verdict.is_chosen for verdict in mine].count(True) == 1
