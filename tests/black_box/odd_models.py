"""Models whose forward takes or returns more than a tensor, to be cut into stages; the same in every process."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SIZE, WIDTH, CLASSES = 4, 6, 3


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Told:
    """Of a library of models: outputs by name, and what is none."""

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    past: Any = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sealed:
    inner: Told
    count: int = 2


class Body(nn.Module):
    """Two layers, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def parts(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(value)
        return hidden, self.c(hidden.tanh())


class InDict(Body):
    def forward(self, value):
        scores = self.parts(value)[1]
        return {"p": scores, "q": [scores * 2, {"r": scores + 1}]}


class InOrder(Body):
    def forward(self, value):
        hidden, scores = self.parts(value)
        return OrderedDict(scores=scores, hidden=hidden)


class OneTuple(Body):
    def forward(self, value):
        return (self.parts(value)[1],)


class OneList(Body):
    def forward(self, value):
        return [self.parts(value)[1]]


class Nested(Body):
    def forward(self, value):
        hidden, scores = self.parts(value)
        return ((scores,), (hidden, (scores.exp(), None, "text", 3)))


class Earlier(Body):
    """An auxiliary value of the first stage beside the last one's."""

    def forward(self, value):
        hidden, scores = self.parts(value)
        return scores, hidden


class Unchanged(Body):
    """What it was given beside its scores."""

    def forward(self, value):
        return self.parts(value)[1], value


class Named(Body):
    def forward(self, value):
        return Pair(*self.parts(value))


class InDataclass(Body):
    def forward(self, value):
        hidden, scores = self.parts(value)
        return Told(scores, (hidden, hidden.sum(1)), None, {"more": scores.square()})


class InSealed(Body):
    def forward(self, value):
        hidden, scores = self.parts(value)
        return Sealed(Told(scores, (hidden,)))


class NestedGiven(Body):
    def forward(self, table, pair):
        return self.c(self.a(table["x"]).tanh() + pair[0]) * pair[1]["scale"][0]


class TupleGiven(Body):
    def forward(self, two):
        return self.c(self.a(two[0]).tanh() + two[1])


class DataclassGiven(Body):
    def forward(self, told):
        return self.parts(told.logits + told.hidden[0])[1]


class AllOut(nn.Module):
    """Every layer's values, by three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, value):
        one = self.a(value)
        two = self.b(one.tanh())
        return {"all": (one, two), "scores": self.c(two + value)}


class Twice(nn.Module):
    """One module is called in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.a(self.b(self.a(value).tanh()).tanh())


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, two):
        return self.a(two[0]).tanh() * two[1]


class Wrapped(nn.Module):
    """The last of a chain of modules, which returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, CLASSES)

    def forward(self, value):
        return Told(self.c(value))


def gated() -> nn.Sequential:
    return nn.Sequential(Gate(), nn.Linear(WIDTH, CLASSES))


def wrapped() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Wrapped())


def norm(*values: Tensor) -> Tensor:
    return torch.stack([value.square().mean() for value in values]).sum()


def of_dict(found: Any) -> Tensor:
    assert type(found) is dict and found["q"][0].shape == found["p"].shape
    return norm(found["p"], found["q"][1]["r"])


def of_order(found: Any) -> Tensor:
    assert type(found) is OrderedDict and list(found) == ["scores", "hidden"]
    return norm(*found.values())


def of_one(found: Any) -> Tensor:
    assert len(found) == 1
    return norm(found[0])


def of_nested(found: Any) -> Tensor:
    (scores,), (hidden, (grown, nothing, text, number)) = found
    assert (nothing, text, number) == (None, "text", 3)
    return norm(scores, hidden, grown) * number


def of_named(found: Any) -> Tensor:
    assert type(found) is Pair
    return norm(found.first, found.second)


def of_told(found: Any) -> Tensor:
    assert type(found) is Told and found.past is None
    return norm(found.logits, *found.hidden, *found.extra.values())


def of_sealed(found: Any) -> Tensor:
    assert type(found) is Sealed
    return of_told(found.inner) * found.count


def of_all(found: Any) -> Tensor:
    return norm(*found["all"], found["scores"])


class Counted(nn.Module):
    """Hands on a buffer that its next forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        self.seen += 1
        return self.last(self.first(given).tanh()) * self.seen


def one_activation() -> nn.Module:
    """A chain that names one module in two places."""
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, CLASSES))


# By what makes the model: the loss that knows what it takes and returns.
LOSSES: dict[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]] = {
    InDict: lambda model, batch: of_dict(model(batch)),
    InOrder: lambda model, batch: of_order(model(batch)),
    OneTuple: lambda model, batch: of_one(model(batch)),
    OneList: lambda model, batch: of_one(model(batch)),
    Nested: lambda model, batch: of_nested(model(batch)),
    Earlier: lambda model, batch: norm(*model(batch)),
    Unchanged: lambda model, batch: norm(*model(batch)),
    Named: lambda model, batch: of_named(model(batch)),
    InDataclass: lambda model, batch: of_told(model(batch)),
    InSealed: lambda model, batch: of_sealed(model(batch)),
    NestedGiven: lambda model, batch: norm(model({"x": batch}, (batch, {"scale": [batch[:, :CLASSES]]}))),
    TupleGiven: lambda model, batch: norm(model((batch, batch * 2))),
    DataclassGiven: lambda model, batch: norm(model(Told(batch, (batch * 3,)))),
    AllOut: lambda model, batch: of_all(model(batch)),
    Twice: lambda model, batch: norm(model(batch)),
    gated: lambda model, batch: norm(model((batch, batch))),
    wrapped: lambda model, batch: of_told(model(batch)),
    Counted: lambda model, batch: norm(model(batch)),
    one_activation: lambda model, batch: norm(model(batch)),
}


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batch_of(step: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(SIZE, WIDTH, generator=draw, dtype=torch.float64)
