"""The contract of a schedule, and `check`, which holds a method of one's own to the contract of its shelf.

A table refuses by itself what cannot be computed. What is looked at here is what ranks make of it: that none waits for
ever, under the rules of gloo and of NCCL, and that the entry says of its table what is so. Rules that are broken are
said in words. The tests of the package hold its own methods to the same rules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from armillary.codecs.registry import CODECS, build_codec
from armillary.contracts.codec import CODEC_RULES
from armillary.contracts.exchange import NotAsked, is_the_sum, rules_of
from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.exchange import DENSE, build_dense
from armillary.plans.registry import Choice, Raised, guess, said_of
from armillary.schedules.checker import Rule, Setting, flaw
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import SCHEDULES, read
from armillary.schedules.schedule import Schedule

__all__ = ["SCHEDULE_RULES", "check"]

CALLS = ("tttd", "tsttd", "tdtttsd")  # t: a step is handed in; s: what is under way is worked off; d: all of it
RULES: tuple[Rule, ...] = ("gloo", "nccl")


def can_be_computed(options: ScheduleOptions, workers: int) -> str:
    """The table refuses by itself what cannot."""
    _table(options)
    return ""


def _table(options: ScheduleOptions) -> Schedule:
    found: Any = options.schedule()
    if not isinstance(found, Schedule):
        raise NotAsked(f"table must give a Schedule; it gave {type(found).__name__}")
    return found


def nobody_waits_for_ever(options: ScheduleOptions, workers: int) -> str:
    schedule, together = _table(options), range(workers // options.replicas(workers))
    ranks = options.ranks(together) if len(together) > 1 else [0] * schedule.workers
    played = (0,) * schedule.workers if len(together) == 1 else tuple(range(schedule.workers))
    for calls, rule in product(CALLS, RULES):
        lists = []
        for rank in together:
            wires = options.wires(buffered=range(schedule.stages))
            rows = Lowering(schedule, rank, ranks, wires=wires)
            does = {"t": rows.next_step, "s": rows.rest, "d": rows.drain}
            lists.append([one for call in calls for one in does[call]()])
        drains = [calls[:place].count("t") for place, call in enumerate(calls) if call == "d"]
        if found := flaw(lists, Setting(schedule, played, drains=drains), rule):
            return f"on {workers} processes, under the rules of {rule}: {found}"
    return ""


def says_of_its_table_what_is_so(options: ScheduleOptions, workers: int) -> str:
    schedule = _table(options)
    said = (options.stages, options.micro_batches)
    if said != (schedule.stages, schedule.micro_batches):
        return f"its options say {said} stages and micro-batches, its table {schedule.stages, schedule.micro_batches}"
    for stage in range(options.stages):
        if not 0 <= (owner := options.where.owner(stage)) < workers:
            return f"the owner of stage {stage} is process {owner} of {workers}"
    return ""


SCHEDULE_RULES: Mapping[str, Callable[[ScheduleOptions, int], str]] = {
    "its table can be computed": can_be_computed,
    "no rank waits for ever, reads what is not there, or leaves a message": nobody_waits_for_ever,
    "owners and sizes are those of its table": says_of_its_table_what_is_so,
}


Rules = Mapping[str, Callable[[], str]]  # empty where a rule is kept, else how it is broken


class _Example(NamedTuple):
    """A method with some options, and the rules it is to keep."""

    text: str
    rules: Rules


def check(name: str) -> str:
    """Holds a registered codec, exchange or schedule to the contract of its shelf, in this one process. Training by it
    is another matter: see `verify` and `twin`.

    Args:
        name: as it was registered; import the file that does so before. With options, as in "top_k(keep=0.3)", these
            are held; else each example that it was registered with.

    Returns:
        What was held, a line an example; `print` it.

    Raises:
        ValueError: nothing has that name, or it breaks rules; each is named, with where it was broken first.
    """
    asked = SCHEDULES.named(DENSE.named(name))
    kept = [line for shelf in (_of_codec, _of_exchange, _of_schedule) for line in _kept(name, shelf(asked))]
    if not kept:
        known = sorted({*CODECS.all(), *DENSE.all(), *SCHEDULES.all()})
        raise ValueError(
            f"check: no codec, dense exchange or schedule {asked.name!r}; there are {', '.join(known)}; "
            f"{guess(asked.name, known)}; in a script, import it"
        )
    return "\n".join(kept)


def _kept(name: str, examples: Iterable[_Example]) -> list[str]:
    """Of one shelf: the exchange that carries gradients by a codec is held only when the codec keeps its rules."""
    kept, broken, raised, count = [], list[str](), dict[str, list[str]](), 0
    for one in examples:
        for rule, broken_by in one.rules.items():
            how = _how(broken_by)
            count += bool(how.said)
            if how.is_raised:
                raised.setdefault(how.said, []).append(f"{one.text}: it is not so that {rule}{how.given}")
            elif how.said:
                broken.append(f"{one.text}: it is not so that {rule}: {how.said}")
        kept.append(f"{one.text} keeps its {len(one.rules)} rules")
    for said, (first, *others) in raised.items():
        more = f", and {len(others)} other rules are broken for the same reason" if others else ""
        broken.append(f"{first}{more}: {said}")
    if broken:
        raise ValueError("\n".join([f"check: {name} breaks {count} of its rules", *broken]))
    return kept


class _How(NamedTuple):
    """A rule is broken; said: empty where it is kept. is_raised: by an error, which may break other rules too. given:
    the numbers with which it was raised, where that is known."""

    said: str
    is_raised: bool = False
    given: str = ""


def _how(broken_by: Callable[[], str]) -> _How:
    """An error is one way, and where it was raised the other half of the answer."""
    try:
        return _How(broken_by())
    except NotAsked as error:
        return _How(str(error), is_raised=True)
    except Raised as error:
        return _How(said_of(error.__cause__ or error), is_raised=True, given=_noted(error))
    except Exception as error:
        return _How(said_of(error), is_raised=True, given=_noted(error))


def _noted(error: Exception) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _of_codec(asked: Choice) -> Iterator[_Example]:
    name = asked.name
    for options in _asked(asked, CODECS[name].examples) if name in CODECS else ():
        yield _Example(f"codec {Choice(name, options)}", _bound(CODEC_RULES, build_codec(name, **options)))


def _of_exchange(asked: Choice) -> Iterator[_Example]:
    name = asked.name
    for options in _asked(asked, DENSE[name].examples) if name in DENSE else ():
        exchange = _built(name, options)
        sums = {} if DENSE[name].departs else {"it is the sum": partial(is_the_sum, exchange)}
        yield _Example(f"exchange {Choice(name, options)}", {**_bound(rules_of(exchange), exchange), **sums})


def _built(name: str, options: Mapping[str, Any]) -> DenseExchange:
    try:
        return build_dense(name, **options)
    except TypeError as error:
        raise ValueError(f"check: exchange {Choice(name, options)} cannot be made: {said_of(error)}") from error


def _of_schedule(asked: Choice) -> Iterator[_Example]:
    for example in SCHEDULES[asked.name].examples if asked.name in SCHEDULES else ():
        given = {key: value for key, value in example.items() if key != "workers"}
        choice, workers = asked if asked.options else Choice(asked.name, given), example["workers"]
        rules = _bound(SCHEDULE_RULES, read(choice, workers), workers)
        yield _Example(f"schedule {choice} on {workers} processes", rules)


def _asked(asked: Choice, examples: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (asked.options,) if asked.options else examples


def _bound(rules: Mapping[str, Callable[..., str]], *args: Any) -> Rules:
    return {rule: partial(broken_by, *args) for rule, broken_by in rules.items()}
