"""The messages of one worker of a ring: receives posted ahead of their use, sends waited for when they must be over.

Note [Nothing can hang]. Every wait is for a message that the schedule's clock places earlier: a receive is posted with
the action during which the message is sent, one ahead of its use at the latest, and a send is waited for only after the
tick at which its receiver needed it. Waiting always for earlier things, workers cannot wait in a circle. There is no
clock at run time; ranks drift into the stagger.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Channel, Pending
from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.schedules.messages import Content, Message

__all__ = ["Courier", "Key"]

Key = tuple[Content, int]  # what travels, of which stage
Over = Callable[[int, int], int]


class Courier:
    """
    Args:
        flat: every stage's layout, by which room is made for what arrives.
        over: of a receiver and the tick at which it needs a message: the last tick at which that is not waited for.
    """

    def __init__(
        self, messages: Sequence[Message], worker: int, channel: Channel, flat: Mapping[int, FlatStage], over: Over
    ) -> None:
        self.out: dict[Key, Message] = {(m.content, m.stage): m for m in messages if m.sender == worker}
        self.into: dict[Key, Message] = {(m.content, m.stage): m for m in messages if m.receiver == worker}
        self._channel, self._flat, self._over = channel, flat, over
        self._posted: dict[Key, deque[list[tuple[Pending, Tensor]]]] = defaultdict(deque)
        self._under_way: list[tuple[int, list[tuple[Pending, Tensor]]]] = []  # (tick after which to wait, message)

    def send(self, key: Key, flats: Flats, receiver: int, needed: int) -> None:
        """Starts a message that its receiver needs at tick `needed`, counted from the first step."""
        started = [(self._channel.post(Send(_what(key), receiver, flat, _what(key))), flat) for flat in flats]
        self._under_way.append((self._over(receiver, needed), started))

    def reap(self, tick: int | None) -> None:
        """Waits for the sends that are to be over at `tick`, or for all; see Note [Nothing can hang]."""
        later = []
        for over, started in self._under_way:
            if tick is not None and over >= tick:
                later.append((over, started))
                continue
            for pending, _ in started:
                pending.wait()
        self._under_way = later

    def post(self, key: Key, sender: int | None = None) -> None:
        """Makes room for a message of the sender that the schedule names, or of another."""
        content, stage = key
        make = {
            "weights": self._flat[stage].empty_weights,
            "forward weights": self._flat[stage].empty_weights,
            "backward weights": self._flat[stage].empty_weights,
            "norm": self._flat[stage].empty_norm,
        }
        flats = make.get(content, self._flat[stage].empty_gradients)()
        peer = self.into[key].sender if sender is None else sender
        what = _what(key)
        self._posted[key].append([(self._channel.post(Receive(what, peer, flat, what)), flat) for flat in flats])

    def posted(self, key: Key) -> int:
        """How many receives are posted and not yet taken."""
        return len(self._posted[key])

    def take(self, key: Key, sender: int | None = None) -> Flats:
        """Waits for the oldest message not yet taken; posts its receive if that was not done."""
        if not self._posted[key]:
            self.post(key, sender)
        flats = []
        for pending, flat in self._posted[key].popleft():
            pending.wait()
            flats.append(flat)
        return flats

    def held(self) -> Iterator[Tensor]:
        """What is kept for messages: room for those that come, and those sent and not yet waited for."""
        for lists in self._posted.values():
            yield from (flat for message in lists for _, flat in message)
        yield from (flat for _, message in self._under_way for _, flat in message)


def _what(key: Key) -> str:
    return f"{key[0]} of stage {key[1]}"
