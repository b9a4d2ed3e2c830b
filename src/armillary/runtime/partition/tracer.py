"""Cuts a model that is no chain, by torch's pipeline tracer. The one file that imports it.

The tracer (torch.export underneath) turns the forward into a graph and splits it where named modules begin. Values that
skip a stage are carried through it, so a stage only ever talks to its neighbours. Parameters are the model's own.

What the trace fixes: the mode (train or eval) of every module, every branch Python took on the example, and the
attributes that Python read (a rate of dropout, a counter): they are constants. Evaluate with the model itself. Source:
PiPPy, now torch.distributed.pipelining, which is imported when something is traced: it brings torch._dynamo, and with
it the start of every rank would take twice as long.
"""

import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from armillary.runtime.partition.stages import ParameterUse, Stage, refuse_ties, tie_complaint

__all__ = ["cut_traced"]


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
    """The first part: names the arguments of the model."""

    def __init__(self, part: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.first, self._names = part, tuple(names)

    def forward(self, value: Any) -> Any:
        values = value if isinstance(value, tuple) else (value,)
        return self.first(dict(zip(self._names, values, strict=True)))


def cut_traced(model: nn.Module, value: Any, points: Sequence[str]) -> list[Stage]:
    """Stages of a traced model, a new one beginning where each module of `points` is called.

    Args:
        value: an example for the first stage; a tuple is the model's positional arguments.
        points: paths of modules in the order in which the forward reaches them.

    Raises:
        ValueError: it cannot be traced, and which module stopped it; a point it never reaches; tied weights.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    arguments = value if isinstance(value, tuple) else (value,)
    split = dict.fromkeys(points, SplitPoint.BEGINNING)
    own_forward = {path: "forward" in vars(model.get_submodule(path)) for path in points}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13's tracer uses what torch 2.13 deprecates
            traced = pipeline(model, arguments, split_spec=split)
    except Exception as failure:
        raise ValueError(f"stages: {_culprit(model, arguments)} cannot be traced: {failure}") from failure
    finally:  # the tracer leaves its marker in the modules' forward
        for path in points:
            if not own_forward[path]:
                vars(model.get_submodule(path)).pop("forward", None)
    if traced.num_stages != len(points) + 1:
        raise ValueError(
            f"stages: {len(points)} points make {traced.num_stages} stages; a module of {list(points)} is called "
            f"never, or more than once"
        )
    _refuse_copies(model, [module for _, module in traced.split_gm.named_children()])
    return _stages(model, traced.split_gm)


def _refuse_copies(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """
    Raises:
        ValueError: several parts read one parameter of the model; the tracer has given each a copy of its own.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    own = {id(parameter) for parameter in known.values()}
    first: dict[int, ParameterUse] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if id(parameter) in own:
                continue
            here = first.setdefault(id(known[name]), ParameterUse(index, name))
            if here.stage != index:
                raise ValueError(tie_complaint(here, ParameterUse(index, name)))


def _stages(model: nn.Module, whole: Any) -> list[Stage]:
    graph: Graph = whole.graph
    parts = [node for node in graph.nodes if node.op == "call_module"]
    number: dict[Node, int] = {part: index for index, part in enumerate(parts)}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = [node for node in graph.nodes if node.op == "output"]
    for node in graph.nodes:
        if node.op == "placeholder":
            number[node] = -1
        elif node.op == "call_function":
            number[node] = max(number[source] for source in node.all_input_nodes)
    model_names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages: list[Stage] = []
    for index, part in enumerate(parts):
        steps = [node for node in graph.nodes if number.get(node) == index]
        kept = [n.name for n in number if number[n] <= index and any(number.get(u, -1) > index for u in n.users)]
        result = None
        if part is parts[-1]:
            (result,) = output.args[0] if len(output.args[0]) == 1 else (output.args[0],)
        module: nn.Module = _Part(whole.get_submodule(part.target), steps, kept, result)
        if index == 0:
            module = _Entry(module, [node.name for node in inputs])
        names = {local: model_names[id(parameter)] for local, parameter in module.named_parameters()}
        stages.append(Stage(index, module, names))
    refuse_ties(stages)
    return stages


def _culprit(model: nn.Module, arguments: tuple[Any, ...]) -> str:
    """The innermost module that cannot be exported on what it is given inside the model."""
    calls: dict[str, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, path=path: calls.setdefault(path, given) and None)
        for path, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    stopped = ""
    for path in sorted(calls, key=lambda path: path.count(".") + bool(path)):
        inside = not stopped or path.startswith(f"{stopped}.")
        if inside and not _exports(model.get_submodule(path), calls[path]):
            stopped = path
    return f"module {stopped!r} ({type(model.get_submodule(stopped)).__name__})"


def _exports(module: nn.Module, arguments: tuple[Any, ...]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.export.export(module, arguments)
    except Exception:  # whatever stops the tracer, in whatever form, is the answer here
        return False
    return True
