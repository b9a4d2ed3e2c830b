"""Requests of which only a part is carried, so that two runs differ by what that part costs.

What a request would bring is made up here, in its right shape: of this rank's own rows where the sizes agree, else
zeros. So everything but the exchange is computed as ever, on rows that mean nothing; losses of such runs are to be
thrown away. That holds once sizes are the same on all ranks, which the first steps must have seen to for real.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.plans import AllGather, AllToAll, Labelled, Request
from armillary.transport.transport import Transport, Wait

__all__ = ["SHORT", "carry_only"]

SHORT = 16  # numbers in a message that stands for a longer one


def carry_only(transport: Transport, what: str) -> None:
    """From now on this run's requests are carried like that. All ranks must call it, between two steps.

    Args:
        what: "nothing"; "rounds": those of look-ups; "messages": all, with as many messages as ever but short ones.
    """
    transport.start = partial(_start, transport, what)  # type: ignore[method-assign]


def _start(transport: Transport, what: str, request: Request, label: str, parts: Sequence[Labelled] = ()) -> Wait:
    answer = _made_up(request, [part.request for part in parts] or [request], transport.place.workers)
    is_round = isinstance(request, AllToAll) and {*request.send, *request.receive} == {1}
    if what == "nothing" or (what == "rounds" and not is_round):
        return lambda: answer
    wait = Transport.start(transport, request if is_round else _short(request), label, parts)

    def waited() -> Any:
        wait()
        return answer

    return waited


def _made_up(request: Request, parts: Sequence[Request], ranks: int) -> Tensor:
    tensor = request.tensor.detach().contiguous()
    if isinstance(request, AllGather):
        return tensor.expand(ranks, *tensor.shape).contiguous()
    if isinstance(request, AllToAll) and any(part.send != part.receive for part in parts):  # type: ignore[union-attr]
        return tensor.new_zeros((sum(request.receive), *tensor.shape[1:]))
    return tensor


def _short(request: Request) -> Request:
    """A request that is carried by as many messages."""
    if not isinstance(request, AllToAll):
        return type(request)(torch.zeros(SHORT * 8), request.scope)
    sizes = (SHORT,) * len(request.send)
    return AllToAll(torch.zeros(sum(sizes)), sizes, sizes, request.scope)
