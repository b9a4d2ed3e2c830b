"""AQ-SGD: an edge that remembers samples, so that only how their activations have changed is coded.

Both ends hold the value of every sample that crossed, as it arrived (`SampleMemory`). The option `cache_mb` bounds what
an end holds of each tensor. A loop has no numbers for its samples, so a sample is known again by a hash of what the
first stage reads of it. One that is augmented at random is another one each time. Every rank of a pipeline is handed
the whole micro-batch, so nothing need cross.

Source: Wang et al., "Fine-tuning language models over slow networks using activation compression with guarantees",
NeurIPS 2022.
"""

from typing import Any

from armillary.plans.registry import Choice
from armillary.schedules.edges import EDGES, Remembered

__all__ = ["aq_sgd"]

CACHE_MB = 256


def aq_sgd(what: str, choice: Choice, options: dict[str, Any]) -> Remembered:
    """
    Raises:
        ValueError: it is not written so.
    """
    of, cache_mb = options.pop("of", None), options.pop("cache_mb", CACHE_MB)
    if what == "edge_back":
        raise ValueError(
            f"edge_back {choice}: a gradient does not come back alike, so nothing of it is remembered; name the codec "
            f"alone"
        )
    if not isinstance(of, str | Choice) or options:
        raise ValueError(
            f"{what} {choice}: want {choice.name}(CODEC, cache_mb={CACHE_MB}), as in {choice.name}(quantize(bits=4))"
        )
    if isinstance(cache_mb, bool) or not isinstance(cache_mb, int | float) or not cache_mb > 0:
        raise ValueError(f"{what} {choice}: cache_mb is what each end may hold, megabytes above 0, got {cache_mb!r}")
    return Remembered(of if isinstance(of, Choice) else Choice(of), int(cache_mb * 1e6))


EDGES.register("aq_sgd", aq_sgd)
