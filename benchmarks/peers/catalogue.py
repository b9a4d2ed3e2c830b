"""All contenders by name, each ready to be given a case; what cannot be imported has a reason instead."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import deepspeed

from benchmarks.peers import planning
from benchmarks.peers.case import Case, Step
from benchmarks.peers.contenders import (
    alone,
    ddp,
    fsdp2,
    link,
    ours,
    ours_scrambled,
    with_deepspeed,
    with_torchrec,
    with_torchrec_bags,
    zero_redundancy,
)

try:
    from benchmarks.peers.contenders import with_horovod
    from benchmarks.peers.rendezvous import horovod
except ImportError as error:  # its build is optional
    with_horovod, horovod, NO_HOROVOD = None, nullcontext, f"not in this environment ({error})"

# DeepSpeed's shared-memory all-reduce serves inference only, and the first run would compile it for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@dataclass(frozen=True)
class Contender:
    """program: what its user writes. around: what must run while it does. exact: its losses must be the truth's."""

    program: Callable[[Case], Step]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    exact: bool = True


def _copying(program: Callable[[Case], Step]) -> Callable[[Case], Step]:
    """For a framework that copies the rows it keeps: its model may be built of values that ranks share."""

    def lent(case: Case) -> Step:
        return program(replace(case, model=case.borrowed))

    return lent


def contenders() -> Mapping[str, Contender]:
    by_hand = {"torchrec": (False, False), "torchrec_scrambled": (True, False), "torchrec_by_hand": (True, True)}
    return {
        "compute_only": Contender(alone.train_sparse, exact=False),
        "link": Contender(link.train, exact=False),
        "ddp": Contender(ddp.train),
        "ddp_5mb": Contender(partial(ddp.train, bucket_mib=5)),
        "ddp_2mb": Contender(partial(ddp.train, bucket_mib=2)),
        "ddp_1mb": Contender(partial(ddp.train, bucket_mib=1)),
        "ddp_sparse": Contender(ddp.train_sparse),
        "fsdp2": Contender(fsdp2.train),
        "zero_redundancy": Contender(zero_redundancy.train),
        **{f"deepspeed_{stage}": Contender(partial(with_deepspeed.train, stage=stage)) for stage in (0, 2, 3)},
        "deepspeed_0_sparse": Contender(with_deepspeed.train_sparse),
        **{
            name: Contender(_copying(partial(with_torchrec.train, scrambled=scrambled, merged=merged)))
            for name, (scrambled, merged) in by_hand.items()
        },
        "torchrec_bags": Contender(_copying(with_torchrec_bags.train)),
        **_horovod(),
        "ours": Contender(_copying(ours.train), planning.closing),
        "ours_ahead": Contender(_copying(ours.train_ahead), planning.closing),
        "ours_scrambled": Contender(_copying(ours_scrambled.train), planning.closing),
    }


def missing() -> Mapping[str, str]:
    """Contenders that this environment lacks, and why."""
    if with_horovod is not None:
        return {}
    return dict.fromkeys(("horovod", "horovod_sparse", "horovod_merged"), NO_HOROVOD)


def _horovod() -> Mapping[str, Contender]:
    if with_horovod is None:
        return {}
    return {
        "horovod": Contender(with_horovod.train, horovod),
        "horovod_sparse": Contender(with_horovod.train_sparse, horovod),
        "horovod_merged": Contender(with_horovod.train_merged, horovod),
    }
