"""Where to cut a chain into stages so that the dearest stage is as cheap as can be.

Source: the balanced cut is torchgpipe's (Kim et al., 2020), by exact search instead of heuristic.
"""

from collections.abc import Sequence

__all__ = ["Cost", "balanced"]

Cost = tuple[float, float]  # forward, backward; any unit


def balanced(link_costs: Sequence[Cost], stages: int) -> tuple[int, ...]:
    """Where to cut so that the dearest stage is as cheap as can be: the first link of every stage but the first.

    Raises:
        ValueError: fewer links than stages.
    """
    count = len(link_costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"stages: {count} modules make no {stages} stages; name more of them in the order of their calls, as in "
            "stages=['net.0', 'net.2'] (to parallelize, auto_plan or profile), or take fewer stages"
        )
    before = [0.0]
    for forward, backward in link_costs:
        before.append(before[-1] + forward + backward)
    # best[end]: (dearest stage, cuts) of the first `end` links in as many stages as rounds so far
    best: list[tuple[float, tuple[int, ...]] | None] = [(before[end], ()) if end else None for end in range(count + 1)]
    for _ in range(stages - 1):
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            options = [
                (max(start_best[0], before[end] - before[start]), (*start_best[1], start))
                for start in range(1, end)
                if (start_best := best[start]) is not None
            ]
            longer[end] = min(options) if options else None
        best = longer
    chosen = best[count]
    assert chosen is not None, f"{stages=} {count=}"
    return chosen[1]
