"""Whether a method of one's own keeps the rules that the rest relies on: a codec, an exchange or a schedule, by name.

The tests of the package hold its own methods to the same rules (`reference/..._contract.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from armillary.codecs.codec import CODECS, build_codec
from armillary.exchanges.exchange import DENSE, build_dense
from armillary.facts.choice import Choice
from armillary.facts.registry import guess
from armillary.reference.codec_contract import CODEC_RULES
from armillary.reference.exchange_contract import EXCHANGE_RULES, is_the_sum
from armillary.reference.schedule_contract import SCHEDULE_RULES
from armillary.schedules.registry import SCHEDULES, read

__all__ = ["check"]

Rules = Mapping[str, Callable[[], str]]  # empty where a rule is kept, else how it is broken


class _Example(NamedTuple):
    """A method with some options, and the rules it is to keep."""

    text: str
    rules: Rules


def check(name: str) -> str:
    """Holds a registered codec, exchange or schedule to the contract of its shelf, with each example of its options, in
    this one process. Training by it is another matter: see `verify` and `twin`.

    Args:
        name: as it was registered; import the file that does so before.

    Returns:
        What was held, a line an example; `print` it.

    Raises:
        ValueError: nothing has that name, or it breaks rules; each is named, with where it was broken first.
    """
    examples = [*_of_codec(name), *_of_exchange(name), *_of_schedule(name)]
    if not examples:
        known = sorted({*CODECS.all(), *DENSE.all(), *SCHEDULES.all()})
        raise ValueError(f"check: no codec, dense exchange or schedule {name!r}; {guess(name, known)}")
    broken = [
        f"{one.text}: it is not so that {rule}: {how}"
        for one in examples
        for rule, broken_by in one.rules.items()
        if (how := broken_by())
    ]
    if broken:
        raise ValueError("\n".join([f"check: {name} breaks {len(broken)} of its rules", *broken]))
    return "\n".join(f"{one.text} keeps its {len(one.rules)} rules" for one in examples)


def _of_codec(name: str) -> Iterator[_Example]:
    for options in CODECS[name].examples if name in CODECS else ():
        yield _Example(f"codec {Choice(name, options)}", _bound(CODEC_RULES, build_codec(name, **options)))


def _of_exchange(name: str) -> Iterator[_Example]:
    for options in DENSE[name].examples if name in DENSE else ():
        exchange = build_dense(name, **options)
        sums = {} if DENSE[name].departs else {"it is the sum": partial(is_the_sum, exchange)}
        yield _Example(f"exchange {Choice(name, options)}", {**_bound(EXCHANGE_RULES, exchange), **sums})


def _of_schedule(name: str) -> Iterator[_Example]:
    for example in SCHEDULES[name].examples if name in SCHEDULES else ():
        given = {key: value for key, value in example.items() if key != "workers"}
        choice, workers = Choice(name, given), example["workers"]
        rules = _bound(SCHEDULE_RULES, read(choice, workers), workers)
        yield _Example(f"schedule {choice} on {workers} processes", rules)


def _bound(rules: Mapping[str, Callable[..., str]], *args: Any) -> Rules:
    return {rule: partial(broken_by, *args) for rule, broken_by in rules.items()}
