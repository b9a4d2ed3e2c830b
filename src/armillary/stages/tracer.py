"""Cuts a model that is no chain, by torch's pipeline tracer. The one file that imports it.

The tracer (torch.export underneath) turns the forward into a graph and splits it where named modules begin. Values that
skip a stage are carried through it, so a stage only ever talks to its neighbours. Parameters are the model's own.

What the trace fixes: the mode (train or eval) of every module, every branch Python took on the example, and the
attributes that Python read (a rate of dropout, a counter): they are constants. Evaluate with the model itself. Source:
PiPPy, now torch.distributed.pipelining, which is imported when something is traced: it brings torch._dynamo, and with
it the start of every rank would take twice as long.
"""

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from armillary.models.structure import Structure, TakenApart, take_apart, unopened
from armillary.stages.partition import Stage

__all__ = ["cut_traced"]

MODEL = "model"  # in `_Flat`
CALL_NUMBER = re.compile(r"@\d+")  # the tracer counts a module's calls in its path
OPENED = "want tensors in tuples, lists, dicts, named tuples or dataclasses"
REMEDY = (
    "Name the model's modules in an nn.Sequential, which is cut without tracing; replace branches on values by "
    "torch.where; or plan without a schedule that cuts"
)


class _Part(nn.Module):
    """One split of the graph: takes the live values of the graph by name, returns those that later parts read."""

    def __init__(self, part: nn.Module, steps: Sequence[Node], kept: Sequence[str], result: Any) -> None:
        super().__init__()
        self.part = part
        self._steps, self._kept, self._result = tuple(steps), tuple(kept), result

    def forward(self, value: Any) -> Any:
        live = dict(value)
        for node in self._steps:
            arguments: Any = map_arg(node.args, lambda source: live[source.name])
            if node.op == "call_module":
                live[node.name] = self.part(*arguments)
            else:
                assert node.target is operator.getitem, node.format_node()
                whole, place = arguments
                live[node.name] = whole[place]
        if self._result is not None:
            return map_arg(self._result, lambda source: live[source.name])
        return {name: live[name] for name in self._kept}


class _Entry(nn.Module):
    """The first part: names the tensors among the model's positional arguments."""

    def __init__(self, part: nn.Module, names: Sequence[str], given: Structure) -> None:
        super().__init__()
        self.first, self._names, self._given = part, tuple(names), given

    def forward(self, given: tuple[Any, ...]) -> Any:
        nest = take_apart(given)
        if nest.structure != self._given:
            raise ValueError(f"stages: the model was traced for {self._given} and is called with {nest.structure}")
        return self.first(dict(zip(self._names, _tensors(nest), strict=True)))


class _Exit(nn.Module):
    """The last part: puts the tensors that leave the graph where the model has them."""

    def __init__(self, part: nn.Module, returned: TakenApart) -> None:
        super().__init__()
        self.last, self._returned = part, returned

    def forward(self, value: Any) -> Any:
        return _filled(self._returned, self.last(value))


class _Flat(nn.Module):
    """The model as the tracer sees it: from the tensors of its arguments to those of what it returns. The structure of
    both is kept here, since the tracer's stages lose it.

    Args:
        given: positional arguments, and those by name. note: gets what the model returns, without its tensors.
    """

    def __init__(self, model: nn.Module, given: TakenApart, note: Callable[[TakenApart], None]) -> None:
        super().__init__()
        self.model, self._given, self._note = model, given, note

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        positional, named = _filled(self._given, tensors)
        output = self.model(*positional, **named)
        if kind := unopened(output):
            raise _Unopened(f"stages: the model returns a {kind}, which nobody can take apart; {OPENED}")
        returned = take_apart(output)
        self._note(_without_tensors(returned))
        return _tensors(returned)


class _Unopened(ValueError):
    """What the model returns cannot be taken apart."""


class _Constant(NamedTuple):
    """A leaf that is no tensor."""

    value: Any


def _tensors(nest: TakenApart) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in nest.leaves if isinstance(leaf, Tensor))


def _without_tensors(nest: TakenApart) -> TakenApart:
    """A place for each tensor, and the constants."""
    return nest._replace(leaves=[None if isinstance(leaf, Tensor) else _Constant(leaf) for leaf in nest.leaves])


def _filled(nest: TakenApart, tensors: Iterable[Tensor]) -> Any:
    """With these in the places of the tensors."""
    rest = iter(tensors)
    return nest.structure.put_together(
        [leaf.value if isinstance(leaf, _Constant) else next(rest) for leaf in nest.leaves]
    )


def cut_traced(model: nn.Module, given: tuple[Any, ...], points: Sequence[str]) -> list[Stage]:
    """Stages of a traced model, a new one beginning where each module of `points` is called. The last returns what the
    model returns, in its structure.

    Args:
        given: an example of the model's positional arguments.
        points: paths of modules in the order in which the forward reaches them.

    Raises:
        ValueError: it cannot be traced, and which module stopped it; a point it never reaches.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    if kind := unopened(given):
        raise ValueError(f"stages: the model is given a {kind}, which nobody can take apart; {OPENED}")
    nest, returned = take_apart((given, {})), list[TakenApart]()
    flat = _Flat(model, _without_tensors(nest), returned.append)
    split = {f"{MODEL}.{point}": SplitPoint.BEGINNING for point in points}
    own_forward = {path: "forward" in vars(model.get_submodule(path)) for path in points}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13's tracer uses what torch 2.13 deprecates
            traced = pipeline(flat, _tensors(nest), split_spec=split)
    except Exception as failure:
        raise ValueError(_untraced(model, given, failure)) from failure
    finally:  # the tracer leaves its marker in the modules' forward
        for path in points:
            if not own_forward[path]:
                vars(model.get_submodule(path)).pop("forward", None)
    if traced.num_stages != len(points) + 1:
        raise ValueError(
            f"stages: {len(points)} points make {traced.num_stages} stages; a module of {list(points)} is called "
            f"never, or more than once"
        )
    read_as = [_put_parameters_back(flat, module) for _, module in traced.split_gm.named_children()]
    return _stages(model, traced.split_gm, read_as, take_apart(given).structure, returned[-1])


def _untraced(model: nn.Module, given: tuple[Any, ...], failure: Exception) -> str:
    """Which module stopped the tracer, by what, and what to do."""
    causes: list[BaseException] = [failure]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if isinstance(causes[-1], _Unopened):
        return str(causes[-1])
    said = str(causes[-1]).strip().partition("\n")[0] or type(causes[-1]).__name__
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    culprit = _culprit(model, given)
    changed = ", ".join([name for name, one in model.named_buffers() if not torch.equal(one, before[name])][:3])
    why = f". Its forward changes buffers ({changed}), which torch's tracer loses" if changed else ""
    return (
        f"stages: {culprit} cannot be traced: {said.rstrip('.')}{why}. A schedule that cuts a model runs one path of "
        f"its forward, whatever the batch holds. {REMEDY}"
    )


def _put_parameters_back(flat: nn.Module, part: nn.Module) -> dict[int, str]:
    """Where several parts read one parameter, or one calls a module twice, the tracer has made copies.

    Returns:
        by which name of the model the part reads each of its parameters, by their ids.
    """
    known, read_as = dict(flat.named_parameters(remove_duplicate=False)), dict[int, str]()
    for path, module in part.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                title = CALL_NUMBER.sub("", f"{path}.{name}")
                module._parameters[name] = known[title]
                read_as.setdefault(id(known[title]), title.removeprefix(f"{MODEL}."))
    return read_as


def _stages(
    model: nn.Module, whole: Any, read_as: Sequence[Mapping[int, str]], given: Structure, returned: TakenApart
) -> list[Stage]:
    graph: Graph = whole.graph
    parts = [node for node in graph.nodes if node.op == "call_module"]
    number: dict[Node, int] = {part: index for index, part in enumerate(parts)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    number[output] = len(parts) - 1
    for node in graph.nodes:
        if node.op == "placeholder":
            number[node] = -1
        elif node.op == "call_function":
            number[node] = max(number[source] for source in node.all_input_nodes)
    model_names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages: list[Stage] = []
    for index, part in enumerate(parts):
        steps = [node for node in graph.nodes if number.get(node) == index and node is not output]
        kept = [n.name for n in number if number[n] <= index and any(number[u] > index for u in n.users)]
        result = None
        if part is parts[-1]:
            found = output.args[0]
            result = tuple(found) if isinstance(found, tuple | list) else (found,)
        module: nn.Module = _Part(whole.get_submodule(part.target), steps, kept, result)
        if index == 0:
            module = _Entry(module, [node.name for node in inputs], given)
        if part is parts[-1]:
            module = _Exit(module, returned)
        names = {local: model_names[id(parameter)] for local, parameter in module.named_parameters()}
        aliases = {model_names[one]: name for one, name in read_as[index].items() if model_names[one] != name}
        stages.append(Stage(index, module, names, aliases))
    return stages


def _culprit(model: nn.Module, given: tuple[Any, ...]) -> str:
    """The innermost module that cannot be exported on what it is given inside the model."""
    calls: dict[str, Any] = {}

    def note(path: str) -> Callable[..., None]:
        return lambda module, positional, named: calls.setdefault(path, (positional, named)) and None

    hooks = [module.register_forward_pre_hook(note(path), with_kwargs=True) for path, module in model.named_modules()]
    try:
        with torch.no_grad():
            model(*given)
    finally:
        for hook in hooks:
            hook.remove()
    stopped = ""
    for path in sorted(calls, key=lambda path: path.count(".") + bool(path)):
        inside = not stopped or path.startswith(f"{stopped}.")
        if inside and not _exports(model.get_submodule(path), calls[path]):
            stopped = path
    return f"module {stopped!r} ({type(model.get_submodule(stopped)).__name__})"


def _exports(module: nn.Module, called_with: Any) -> bool:
    nest = take_apart(called_with)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.export.export(_Flat(module, _without_tensors(nest), _no_note), _tensors(nest))
    except Exception:  # whatever stops the tracer, in whatever form, is the answer here
        return False
    return True


def _no_note(returned: TakenApart) -> None:
    """Nobody asks what it returns."""
