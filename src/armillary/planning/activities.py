"""What one group does in a step, piece by piece: the seconds of its forecast, taken apart in the order of their time.

Pricing adds up what a group costs; the simulator has to know what of it comes before forward and what after backward,
what is on which link and what on the processor. The pieces add up to the forecast.
"""

from typing import NamedTuple

from armillary.exchanges.exchange import build_dense, build_row, row_exchanges
from armillary.exchanges.look_up import HEADER_BYTES
from armillary.facts.plan import Group
from armillary.facts.topology import Topology
from armillary.planning.clock import Request
from armillary.planning.pricing import Case, owners_of, row_forecast
from armillary.planning.traffic import busiest_share, traffic

__all__ = ["Activities", "activities", "idle_request"]
