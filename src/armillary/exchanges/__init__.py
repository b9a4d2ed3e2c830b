"""How one group of tensors crosses the workers: exchange.py and dense.py are the contract, then one file an exchange.

What the file of an exchange imports stands here; what it asks of the network stands in `armillary.plans`.
"""

from armillary.exchanges.dense import (
    AveragedGradients,
    CompletedPush,
    DenseExchange,
    EarlyLegs,
    Leg,
    Legs,
    Mechanisms,
    PushResult,
    exact_sum,
)
from armillary.exchanges.exchange import (
    DENSE,
    ROW,
    Counts,
    ExchangeEntry,
    Pulled,
    RowExchange,
    RowTraffic,
    Staying,
    build_dense,
    build_row,
    dense_exchange,
    dense_exchanges,
    row_exchange,
    row_exchanges,
)
from armillary.exchanges.ownership import Ownership, owners_among
from armillary.plans.parcel import Parcel, RankInfo, Rows, State, parted, touched_rows

__all__ = [
    "DENSE",
    "ROW",
    "AveragedGradients",
    "CompletedPush",
    "Counts",
    "DenseExchange",
    "EarlyLegs",
    "ExchangeEntry",
    "Leg",
    "Legs",
    "Mechanisms",
    "Ownership",
    "Parcel",
    "Pulled",
    "PushResult",
    "RankInfo",
    "RowExchange",
    "RowTraffic",
    "Rows",
    "State",
    "Staying",
    "build_dense",
    "build_row",
    "dense_exchange",
    "dense_exchanges",
    "exact_sum",
    "owners_among",
    "parted",
    "row_exchange",
    "row_exchanges",
    "touched_rows",
]
