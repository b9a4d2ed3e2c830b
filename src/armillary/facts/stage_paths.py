"""The stages of a model: modules given by their paths, and when a forward pass is inside which.

Parameters belong to stages, and costs are counted by stage, so both must agree on what a stage is. Work done
outside every stage (the loss, the glue) belongs to the stage "".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["OUTSIDE", "following", "stage_of", "stage_paths"]

OUTSIDE = ""


def stage_paths(model: nn.Module, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The stages: the paths wanted, or else the model's children.

    A child that is only a container (`ModuleList`, `ModuleDict`) is never called itself, so its own children
    stand for it.

    Raises:
        ValueError: a wanted path names no module, or is wanted twice.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if wanted:
        wrong = [path for path in wanted if path not in modules or path == OUTSIDE]
        if wrong or len(set(wanted)) < len(wanted):
            known = ", ".join(path for path in modules if path)
            raise ValueError(f"profile: stages {list(wanted)} must be different modules; there are {known}")
        return tuple(wanted)
    paths: list[str] = []
    queue = [name for name, _ in model.named_children()]
    while queue:
        path = queue.pop(0)
        children = [f"{path}.{name}" for name, _ in modules[path].named_children()]
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
            queue = children + queue
        else:
            paths.append(path)
    return tuple(paths)


def stage_of(path: str, stages: Sequence[str]) -> str:
    """The innermost stage that holds the module or parameter at `path`; "" if none does."""
    holders = [stage for stage in stages if path == stage or path.startswith(f"{stage}.")]
    return max(holders, key=len, default=OUTSIDE)


@contextmanager
def following(
    model: nn.Module,
    stages: Sequence[str],
    enter: Callable[[str, Any], None],
    leave: Callable[[str, Any], None],
) -> Iterator[None]:
    """Calls enter(stage, inputs) and leave(stage, outputs) around every module of a stage, nested ones
    too."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        stage = stage_of(path, stages)
        if stage == OUTSIDE:
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, stage: str = stage) -> None:
            enter(stage, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any, stage: str = stage) -> None:
            leave(stage, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
