"""Which contenders meet in which case, on how many workers, at which speeds of links, for how many rounds.

Contenders of one heat take turns in the same rounds. Those that cannot win have a short heat of their own, in which
`ours` runs beside them, so that ratios are always between turns that stood next to each other.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measuring.measure import Rounds
from benchmarks.measuring.model import Sizes
from benchmarks.peers import cases
from benchmarks.peers.case import Case

TINY = Sizes(vocabulary=512, features=8, hidden=8, projection=4, sentences=2, words=4, negatives=16)
DENSE = ("ddp", "fsdp2", "zero_redundancy", "deepspeed_0", "deepspeed_2", "deepspeed_3", "horovod")
BY_ROW = ("ddp_sparse", "deepspeed_0_sparse", "horovod_sparse", "horovod_merged")
TORCHREC = ("torchrec", "torchrec_scrambled", "torchrec_by_hand")
BUCKETS = ("ddp", "ddp_5mb", "ddp_2mb", "ddp_1mb")


@dataclass(frozen=True)
class Heat:
    """Contenders by turns; rounds says how many turns of how many steps."""

    names: tuple[str, ...]
    rounds: Rounds

    @property
    def steps(self) -> int:
        """That a contender takes in one turn."""
        return self.rounds.warm_steps + self.rounds.timed_steps


@dataclass(frozen=True)
class Entry:
    """One case as it is run.

    Args of note:
        case: (Mbit/s, workers, folder, small) -> what is trained; small is for the rehearsal.
        prepare: what rank 0 puts into the folder first.
    """

    workers: int
    rates: tuple[float, ...]  # Mbit/s; 0 is unshaped
    heats: tuple[Heat, ...]
    case: Callable[[float, int, Path, bool], Case]
    prepare: Callable[[Path], None] = lambda _: None

    @property
    def most_steps(self) -> int:
        return max(heat.steps for heat in self.heats)

    def only(self, heat: int) -> "Entry":
        """The same with that heat alone, counted from 0."""
        return replace(self, heats=(self.heats[heat],))

    def without(self, refused: Collection[str]) -> tuple[Heat, ...]:
        """The heats of those that can run."""
        kept = [replace(heat, names=tuple(n for n in heat.names if n not in refused)) for heat in self.heats]
        return tuple(heat for heat in kept if heat.names)

    def for_rounds(self, rounds: int) -> "Entry":
        """The same with at most so many rounds in each heat, for a shorter run; 0 leaves them as they are."""
        if not rounds:
            return self
        few = [replace(h, rounds=replace(h.rounds, rounds=min(rounds, h.rounds.rounds))) for h in self.heats]
        return replace(self, heats=tuple(few))


def entries() -> Mapping[str, Entry]:
    everyone = Heat(("compute_only", *DENSE, "ddp_2mb", *BY_ROW, *TORCHREC, "ours"), Rounds(2, 1, 3))
    makers = cases.workloads().items()
    return {
        "lm8": _lm(Sizes(), 8, (100.0, 1000.0), _LM8),
        "lm2": _lm(replace(TINY, vocabulary=20_000, features=64, negatives=256), 2, (100.0, 1000.0), (everyone,)),
        "dense": Entry(2, (1000.0, 0.0), _DENSE, cases.perceptron),
        **{name: Entry(4, (1000.0,), (_of_workload(name, everyone),), make) for name, make in makers},
    }


def _of_workload(name: str, everyone: Heat) -> Heat:
    extra = ("torchrec_bags",) if name == "recommender" else ()
    return replace(everyone, names=(*everyone.names, *extra))


_LM8 = (
    Heat(
        ("compute_only", "link", "ddp_sparse", "torchrec_by_hand", "ours", "ours_ahead"),
        # Prefetch learns from its first steps what is looked up. Ratios of single rounds are up to a fifth apart.
        Rounds(8, 6, 6),
    ),
    Heat((*BY_ROW[1:], "ours", "ours_ahead", *DENSE), Rounds(2, 6, 2)),
    Heat(("ours", "ours_scrambled"), Rounds(5, 4, 4)),  # what the order of ids costs us
    Heat((*TORCHREC[:2], "ours"), Rounds(2, 2, 3)),  # and others
)
_DENSE = (
    Heat(("compute_only", "link", *BUCKETS, "ours"), Rounds(16, 2, 4)),  # of 3 %, with rounds from 0.7 to 1.5
    Heat((*DENSE[1:], "ours"), Rounds(1, 1, 2)),
)


def _lm(sizes: Sizes, workers: int, rates: tuple[float, ...], heats: tuple[Heat, ...]) -> Entry:
    def case(mbit: float, workers: int, folder: Path, small: bool) -> Case:
        return cases.lm(TINY if small else sizes, workers, mbit, folder)

    def prepare(folder: Path) -> None:
        cases.write_start(TINY, folder)
        cases.write_start(sizes, folder)

    return Entry(workers, rates, heats, case, prepare)
