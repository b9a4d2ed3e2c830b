"""What one stage of a cut model costs and carries, per micro-batch: the profile's facts, joined."""

from dataclasses import dataclass

from armillary.facts.stage import Numbers

__all__ = ["StageLoad"]


@dataclass(frozen=True)
class StageLoad:
    """first, last: paths of its modules. flops: of the forward. seconds: forward and backward,
    and the gradients of tables that it keeps whole.

    Args of note:
        weight_bytes: of the trained parameters. count_bytes: of one number per parameter, sent behind gradients.
        cache_bytes: held once, however many micro-batches are under way: what its edges remember of samples.
        output_bytes: what it hands to the next stage. output_numbers: of what of it a codec may write.
    """

    first: str
    last: str
    flops: int
    seconds: float
    weight_bytes: int
    count_bytes: int
    activation_bytes: int
    output_bytes: int
    output_numbers: tuple[Numbers, ...] = ()
    cache_bytes: int = 0
