"""The contract of dense exchanges, which names none of them."""

import pytest

from armillary.contracts.exchange import EXCHANGE_RULES, is_the_sum
from armillary.exchanges import build_dense, dense_exchanges

CASES = [(name, options) for name, entry in dense_exchanges().items() for options in entry.examples]


@pytest.mark.parametrize("rule", EXCHANGE_RULES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_exchange_keeps_the_rules(name, options, rule):
    assert EXCHANGE_RULES[rule](build_dense(name, **options)) == ""


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_departs_from_nothing_is_the_sum(name, options):
    assert dense_exchanges()[name].departs or is_the_sum(build_dense(name, **options)) == ""


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match="no dense exchange 'allreduce'; there are all_reduce"):
        build_dense("allreduce")
