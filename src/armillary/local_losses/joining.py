"""Parts trained on several ranks, brought together: every rank then has the whole model."""

from collections.abc import Sequence

from armillary.local_losses.apart_part import ApartPart
from armillary.local_losses.groups import PartsGroup

__all__ = ["joined"]


def joined(parts: Sequence[ApartPart], timeout_seconds: float = 600.0) -> list[ApartPart]:
    """Collective: rank r has trained part r, and afterwards every rank has all parts. In one process nothing moves.

    Args:
        timeout_seconds: for a rank that is still training.

    Raises:
        RuntimeError: a rank did not come; it is named.
        ValueError: on every rank: ranks and parts are not as many, differ in their settings, or a part is not trained.
    """
    group = PartsGroup(timeout_seconds)
    try:
        if group.workers == 1:
            mine = [f"part {part.number} is not trained" for part in parts if not part.is_trained]
            _refuse(mine[:1])
        else:
            _refuse_other_ranks(parts, group)
            for part in parts:
                for _, tensor in sorted(part.body.state_dict().items()):
                    group.spread(tensor, part.number)
            chains = group.told([part.learnt_from for part in parts])
            for part in parts:
                part.learnt_from = chains[part.number][part.number]
        for part in parts:
            part.refuse_broken_chain()
    finally:
        group.close()
    return list(parts)


def _refuse_other_ranks(parts: Sequence[ApartPart], group: PartsGroup) -> None:
    mine = group.rank < len(parts) and parts[group.rank].is_trained
    found = group.told((_form(parts), mine))
    if group.workers != len(parts):
        _refuse([f"{group.workers} ranks for {len(parts)} parts; rank r trains part r, so start as many ranks"])
    for rank, (form, is_trained) in enumerate(found):
        if form != found[0][0]:
            _refuse([f"rank {rank} has other parts or settings than rank 0; call apart on both with the same"])
        if not is_trained:
            _refuse([f"rank {rank} has not trained part {rank}; train it before joined"])


def _form(parts: Sequence[ApartPart]) -> list[str]:
    tensors = [f"{part.number} {name} {tuple(one.shape)}" for part in parts for name, one in part.state_dict().items()]
    return [str(parts[0].settings), *tensors]


def _refuse(errors: Sequence[str]) -> None:
    for error in errors:
        raise ValueError(f"local_losses: {error}")
