"""What to do where a wait failed, by the calls that the ranks are in; whether the transport's own words say more."""

from collections.abc import Sequence

from armillary.runtime.standing import ABSENT, CLOSED, LET_GO, SILENT, Stand

__all__ = ["adds_nothing", "remedy"]

# What gloo says of a peer that has left or did not come: not who, nor in what.
_BARE = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused")

_COLLECTIVE = ("save", "load", "export", "evaluate", "report")
_NORM = "the norm of a spread table's gradient is known only if every rank asks for it"
_CLOSED = (
    "a rank that has left the run serves no other: call run.evaluate on every rank before run.close(), or evaluate the "
    "plain model after it"
)
_UNEVEN = "ranks that may run out of data at different steps want run.batches(loader)"
_SERVE = (
    "rows of a spread table are served by ranks that are in a call of armillary's: let every rank evaluate "
    "(run.evaluate), or train on meanwhile"
)
_ABSENT = "every rank of the job must call attach, or parallelize, and come within the timeout"
_SILENT = (
    "a silent process was killed or stopped, or is in a call that lets no other thread run: see its output and "
    "whether it ran out of memory"
)
_AWAY = (
    "a rank may be away for as long as timeout= of attach or parallelize says: give more; if its data ran out, use "
    "run.batches(loader)"
)


def adds_nothing(error: BaseException) -> bool:
    """Whether the transport's own words say no more than that a peer is gone or late."""
    text = str(error).lower()
    return any(bare in text for bare in _BARE)


def remedy(mine: Stand, peers: Sequence[Stand]) -> str:
    """What to do; empty if where the ranks stand does not say."""
    here = [peer for peer in peers if not peer.end]
    calls = dict.fromkeys([mine.call, *(peer.call for peer in here)])
    said = []
    if len(calls) > 1:
        said = [f"every rank must call run.{call}, not one alone" for call in calls if call in _COLLECTIVE]
        said += [_NORM] * ("gradient norm" in calls) + [_UNEVEN] * ("close" in calls)
    said += [_ABSENT] * any(peer.end == ABSENT for peer in peers)
    said += [_SILENT] * any(peer.end == SILENT for peer in peers)
    if any(not peer.call for peer in here):
        said.append(_SERVE if mine.call == "look-up" else _AWAY)
    if any(peer.end in (CLOSED, LET_GO) for peer in peers):
        said.append(_CLOSED if mine.call == "evaluate" else _UNEVEN)
    text = "; ".join(dict.fromkeys(said))
    return text[:1].upper() + text[1:]
