"""N ranks in one process, in lockstep: what every request means, without a network.

Runs one program per rank; answers a request when every rank of its scope has asked, checks that they asked for the same
thing (a real job would hang, or worse, mix up answers), and counts the bytes each rank sends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.plans.requests import AllGather, AllReduce, AllToAll, Program, Request, members, sent_bytes

__all__ = ["OutOfStep", "run"]


class OutOfStep(RuntimeError):
    """Ranks asked for different things at the same place of their programs."""


def run(programs: Sequence[Program[Any]], workers_per_node: int = 1) -> tuple[list[Any], list[float]]:
    """Runs one program per rank to its end.

    Returns:
        What each program returned, and the bytes each rank sent.

    Raises:
        OutOfStep: ranks ask for different kinds, scopes or sizes, or some end while others still ask.
    """
    workers = len(programs)
    results: list[Any] = [None] * workers
    sent = [0.0] * workers
    answers: list[Any] = [None] * workers
    while True:
        asked: list[Request | None] = []
        for rank, program in enumerate(programs):
            try:
                asked.append(program.send(answers[rank]))
            except StopIteration as stop:
                results[rank] = stop.value
                asked.append(None)
        words = [f"{type(request).__name__} in {request.scope}" if request else "nothing" for request in asked]
        if set(words) == {"nothing"}:
            return results, sent
        if len(set(words)) > 1:
            raise OutOfStep(f"ranks out of step: {', '.join(f'{rank}: {word}' for rank, word in enumerate(words))}")
        requests = [request for request in asked if request is not None]
        for scope in members(requests[0].scope, workers, workers_per_node):
            for place, (rank, answer) in enumerate(
                zip(scope, _answers([requests[rank] for rank in scope]), strict=True)
            ):
                sent[rank] += sent_bytes(requests[rank], len(scope), place)
                answers[rank] = answer


def _answers(asked: Sequence[Request]) -> list[Any]:
    first = asked[0]
    if isinstance(first, AllToAll):
        return _exchange([request for request in asked if isinstance(request, AllToAll)])
    tensors = [request.tensor for request in asked]
    _refuse_unlike(type(first).__name__, tensors)
    if isinstance(first, AllReduce):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor
        return [total.clone() for _ in asked]
    assert isinstance(first, AllGather)
    return [torch.stack(tensors) for _ in asked]


def _refuse_unlike(kind: str, tensors: Sequence[Tensor]) -> None:
    shapes, dtypes = [tuple(tensor.shape) for tensor in tensors], [str(tensor.dtype) for tensor in tensors]
    if len(set(shapes)) > 1 or len(set(dtypes)) > 1:
        raise OutOfStep(f"ranks give {kind} shapes {shapes} of {dtypes}; want one")


def _exchange(asked: Sequence[AllToAll]) -> list[Any]:
    _refuse_unlike("AllToAll rows of", [request.tensor[:0] for request in asked])
    pieces = [request.tensor.split(list(request.send)) for request in asked]
    for receiver, request in enumerate(asked):
        for sender, size in enumerate(request.receive):
            if asked[sender].send[receiver] != size:
                raise OutOfStep(
                    f"rank {receiver} expects {size} rows from rank {sender}, "
                    f"which sends {asked[sender].send[receiver]}"
                )
    return [
        torch.cat([pieces[sender][receiver] for sender in range(len(asked))]).clone() for receiver in range(len(asked))
    ]
