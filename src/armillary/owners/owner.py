"""The owner on a rank: its part of the parameters, and a thread that answers pulls and steps with pushes as they come.

Parameters that are read whole are dealt by their bytes, each whole to one owner; rows of a table are dealt to all, one
after the other. An owner steps by an optimizer of its own, of the user's class, with the options that the worker sends.
Rows that a push does not name stay as they are, whatever the optimizer would do to them.

A letter's body is tensors one after the other, each beginning at a multiple of eight bytes. It says itself what is in
it. An answer holds tensors alone: whoever asked knows their forms, and makes room for it before it comes.

A pull of a worker that is more than `bound` steps ahead of the slowest waits here until the others have come. What was
done is logged when it is done, so the log's order is that of the values. A worker that steps aside (it saves, evaluates
or ends) is waited for by nobody.

Source: Parallax (Kim et al., 2019), asynchronous training; the bound is that of stale synchronous parallel (Ho et al.,
2013). Departure: the bound is each owner's own, on the updates that it made.
"""

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.ownership import Ownership
from armillary.plans.update_log import Event, Kind, UpdateLog, too_far_ahead
from armillary.tables.optimizer_state import Held, close_window, is_row_shaped, open_window
from armillary.tables.optimizers import over
from armillary.transport.mailbox import LAST, OwnerLetter, OwnerMailbox

__all__ = [
    "DEAL",
    "Body",
    "BodyForm",
    "GroupOptions",
    "OwnedPart",
    "Owner",
    "Ownings",
    "Parts",
    "joined",
    "joined_rows",
    "options_of",
    "owned_by_bytes",
    "packed",
    "size_of",
    "taken",
    "unpacked",
]

ALIGNED = 8


class BodyForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def room(self) -> int:
        """Bytes up to where the next tensor begins."""
        return self.nbytes + -self.nbytes % ALIGNED


def size_of(forms: Sequence[BodyForm]) -> int:
    """Bytes of a body."""
    return sum(form.room for form in forms)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A body; copies."""
    forms, at = [BodyForm(tuple(one.shape), one.dtype) for one in tensors], 0
    body = torch.empty(size_of(forms), dtype=torch.uint8)
    for tensor, form in zip(tensors, forms, strict=True):
        body[at : at + form.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        at += form.room
    return body


def taken(body: Tensor, forms: Sequence[BodyForm]) -> list[Tensor]:
    """The tensors of a body; views."""
    found, at = list[Tensor](), 0
    for form in forms:
        found.append(body[at : at + form.nbytes].view(form.dtype).view(form.shape))
        at += form.room
    return found


Parts = Mapping[str, Sequence[Tensor]]  # by parameter


class Body(NamedTuple):
    head: Any
    parts: Parts


def packed(head: Any, parts: Parts) -> Tensor:
    """head: is pickled, with the forms of the tensors."""
    tensors = [one for each in parts.values() for one in each]
    forms = {name: [BodyForm(tuple(one.shape), one.dtype) for one in each] for name, each in parts.items()}
    said = bytearray(pickle.dumps((head, forms)))
    return joined([torch.tensor([len(said)]), torch.frombuffer(said, dtype=torch.uint8), *tensors])


def unpacked(body: Tensor) -> Body:
    length = BodyForm((1,), torch.int64)
    said = BodyForm((int(taken(body, [length])[0]),), torch.uint8)
    head, forms = pickle.loads(bytes(taken(body, [length, said])[1].numpy()))
    _, _, *tensors = taken(body, [length, said, *(form for each in forms.values() for form in each)])
    left = iter(tensors)
    return Body(head, {name: [next(left) for _ in each] for name, each in forms.items()})


GroupOptions = list[dict[str, Any]]  # of every parameter group, all but the parameters


@dataclass(frozen=True)
class Ownings:
    """dense: names by owner, each in the order of the model. tables: by name, whose rows all ranks own."""

    dense: tuple[tuple[str, ...], ...]
    tables: Mapping[str, Ownership]

    @property
    def owners(self) -> range:
        return range(len(self.dense))


@dataclass(eq=False)
class _Window:
    """A table's rows here, and those of them that are stepped (`tables/optimizer_state.Windowed`)."""

    shard: Tensor
    parameter: nn.Parameter
    window_rows: Tensor | None = None

    def put_back(self, rows: Tensor, values: Tensor) -> None:
        self.shard.index_copy_(0, rows, values)


def owned_by_bytes(parameters: Mapping[str, Tensor], tables: Iterable[str], workers: int) -> Ownings:
    """The largest first, each to the owner that has least; alike on every rank."""
    by_row = {*tables}
    loads, owner_of = [0] * workers, dict[str, int]()
    whole = [name for name in parameters if name not in by_row]
    for name in sorted(whole, key=lambda name: -parameters[name].nbytes):
        owner_of[name] = min(range(workers), key=lambda rank: loads[rank])
        loads[owner_of[name]] += parameters[name].nbytes
    dense = tuple(tuple(name for name in whole if owner_of[name] == rank) for rank in range(workers))
    ranks, rows = tuple(range(workers)), {name: len(one) for name, one in parameters.items() if name in by_row}
    return Ownings(dense, {name: Ownership(count, ranks, workers) for name, count in rows.items()})


def options_of(optimizer: Optimizer) -> GroupOptions:
    """As they are now; tensors among them are copied."""
    return [
        {key: one.clone() if isinstance(one, Tensor) else one for key, one in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class OwnedPart:
    """Of one rank.

    Args:
        parameters: all that are trained, by name, whole; they are copied. optimizer: over them; it is not stepped.
    """

    def __init__(
        self, ownings: Ownings, rank: int, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> None:
        self.ownings, self.rank = ownings, rank
        self.whole = {name: nn.Parameter(parameters[name].detach().clone()) for name in ownings.dense[rank]}
        self.tables: dict[str, _Window] = {}
        self.row_state: dict[str, Held] = {name: {} for name in ownings.tables}
        for name, dealt in ownings.tables.items():
            shard = parameters[name].detach()[dealt.ids(rank)]
            self.tables[name] = _Window(shard, nn.Parameter(shard[:0].clone()))
        self._stepped = self.whole | {name: one.parameter for name, one in self.tables.items()}
        mine = {id(parameters[name]): one for name, one in self._stepped.items()}
        groups = [
            {**group, "params": [mine[id(one)] for one in group["params"] if id(one) in mine]}
            for group in optimizer.param_groups
        ]
        self.optimizer = over(optimizer, groups)
        for name, one in self._stepped.items():
            self._take_state(name, one, parameters[name], optimizer.state.get(parameters[name], {}))

    def _take_state(self, name: str, mine: nn.Parameter, theirs: Tensor, state: Mapping[str, Any]) -> None:
        if name in self.tables:
            rows = {key: one for key, one in state.items() if is_row_shaped(one, theirs)}
            self.row_state[name] = {key: one[self.ownings.tables[name].ids(self.rank)] for key, one in rows.items()}
            self.optimizer.state[mine] = copy.deepcopy({key: one for key, one in state.items() if key not in rows})
        elif state:
            self.optimizer.state[mine] = copy.deepcopy(dict(state))

    def read(self, rows: Parts) -> dict[str, Tensor]:
        """Copies of what is owned whole, then of these rows of each table, in the order of `Ownings`."""
        tables = {name: one.shard.index_select(0, rows[name][0]) for name, one in self.tables.items()}
        return {name: one.detach().clone() for name, one in self.whole.items()} | tables

    @torch.no_grad()
    def step(self, options: GroupOptions, gradients: Parts) -> None:
        """One optimizer step of what has a gradient: of a table the rows, ascending, before their values."""
        for group, now in zip(self.optimizer.param_groups, options, strict=True):
            group.update(now)
        for name, (*rows, gradient) in gradients.items():
            if rows:
                table = self.tables[name]
                table.window_rows = rows[0]
                table.parameter.data = table.shard.index_select(0, rows[0])
                open_window(table, self.optimizer, self.row_state[name])
            self._stepped[name].grad = gradient
        with torch.enable_grad():
            self.optimizer.step()
        for name in gradients:
            if name in self.tables:
                close_window(self.tables[name], self.optimizer, self.row_state[name])
            self._stepped[name].grad = None

    def rest_of(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of it here: of a table, what is not by row, such as a count of steps."""
        state = self.optimizer.state.get(self._stepped[name], {}) if name in self._stepped else {}
        return {key: value for key, value in state.items() if key not in self.row_state.get(name, {})}

    def tensors(self, name: str) -> list[Any]:
        """All that is held of a parameter here."""
        values = self.tables[name].shard if name in self.tables else self.whole.get(name)
        return [values, *self.rest_of(name).values(), *self.row_state.get(name, {}).values()]


def joined_rows(parts: Sequence[Tensor], dealt: Ownership) -> Tensor:
    """A whole table, or what is shaped as one, from the parts of all owners."""
    whole = parts[0].new_empty((dealt.rows, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[dealt.ids(rank)] = part
    return whole


DEAL = len(Kind)  # a letter that asks for the number of the next batch; no event of the log


class Owner:
    """
    Args:
        part: what it owns.
        bound: how many steps ahead of the slowest a worker may begin one; None: any.

    Args of note:
        error: that ended its thread. sent: bytes of its answers over links, by parameter.
    """

    def __init__(self, part: OwnedPart, workers: int, bound: int | None, post: OwnerMailbox) -> None:
        self.part, self.bound, self.post = part, bound, post
        self.log = UpdateLog()
        self.sent = Counter(dict.fromkeys([*part.whole, *part.tables], 0))  # the other thread reads it
        self.error: BaseException | None = None
        self._updates = dict.fromkeys(range(workers), 0)
        self._present = set(range(workers))
        self._options: dict[int, GroupOptions] = {}
        self._late: list[OwnerLetter] = []
        self._dealt = Counter[int]()  # batches, by epoch
        self._asides = dict.fromkeys(range(workers), 0)  # how often each worker stepped aside
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="armillary-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        """After the last letters."""
        self._thread.join(seconds)

    def wait_aside(self, times: int, seconds: float) -> None:
        """Until every worker has stepped aside so often: all that they sent before has been done then.

        Raises:
            RuntimeError: one has not, in so many seconds; or the thread has ended with an error.
        """
        with self._heard:
            self._heard.wait_for(lambda: self.error is not None or min(self._asides.values()) >= times, seconds)
        self.refuse_failed()
        if late := [worker for worker, count in self._asides.items() if count < times]:
            raise RuntimeError(f"timed out: no word of rank {', '.join(map(str, late))} that it has come")

    def refuse_failed(self) -> None:
        if self.error is not None:
            raise RuntimeError(
                f"the owner's thread ended with {type(self.error).__name__}: {self.error}"
            ) from self.error

    def _serve(self) -> None:
        try:
            while (letter := self.post.next()).numbers[0] != LAST:
                self.take(letter)
        except BaseException as error:
            with self._heard:
                self.error = error
                self._heard.notify_all()
            self.post.fail(error)

    def take(self, letter: OwnerLetter) -> None:
        """Does what a letter asks for."""
        kind, step, epoch = letter.numbers[:3]
        if kind == DEAL:
            number = torch.tensor([self._dealt[epoch]])
            self._dealt[epoch] += 1
            self.post.answer(letter.sender, number.view(torch.uint8))
        elif kind == Kind.PULL:
            self._pull(letter)
        elif kind == Kind.PUSH:
            self._push(letter, step)
        else:
            self._step_aside(letter, step)

    def _pull(self, letter: OwnerLetter) -> None:
        if self._is_early(letter):
            self.log.waited += 1
            self._late.append(letter)
        else:
            self._give(letter)

    def _is_early(self, letter: OwnerLetter) -> bool:
        ahead = {worker: self._updates[worker] for worker in self._present | {letter.sender}}
        return too_far_ahead(letter.numbers[1], ahead, self.bound)

    def _give(self, letter: OwnerLetter) -> None:
        _, step, epoch, batch, _ = letter.numbers
        self._present.add(letter.sender)
        values = self.part.read(unpacked(letter.body).parts)
        self.log.append(Event(Kind.PULL, letter.sender, step, epoch, batch))
        if self.post.answer(letter.sender, joined([*values.values()])):
            self.sent.update({name: one.nbytes for name, one in values.items()})

    def _push(self, letter: OwnerLetter, step: int) -> None:
        worker = letter.sender
        if step < self._updates[worker]:  # it came before
            return
        options, gradients = unpacked(letter.body)
        if options is not None:
            self._options[worker] = options
        self.part.step(self._options[worker], gradients)
        self.log.append(Event(Kind.PUSH, worker, *letter.numbers[1:4]))
        self._updates[worker] += 1
        self._let_in()

    def _step_aside(self, letter: OwnerLetter, step: int) -> None:
        self._present.discard(letter.sender)
        self.log.append(Event(Kind.ASIDE, letter.sender, step))
        self._let_in()
        with self._heard:
            self._asides[letter.sender] += 1
            self._heard.notify_all()

    def _let_in(self) -> None:
        """Those that no longer are too far ahead, in the order in which they came."""
        waiting, self._late = self._late, []
        for letter in waiting:
            if self._is_early(letter):
                self._late.append(letter)
            else:
                self._give(letter)
