"""What is being done to a model, marked on it, so that what does not go with it can refuse by name."""

import weakref

from torch import nn

__all__ = ["mark_model", "marked", "passes_alike", "unmark_model"]

_MARKS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_ALIKE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_model(model: nn.Module, what: str, *, needs_alike_passes: bool = False) -> None:
    """
    Args:
        what: in words that follow "the model", with the remedy.
        needs_alike_passes: of ranks that no process group of the run joins; so none may look at the model alone, or as
            often as its clock says.
    """
    _MARKS[model] = what
    if needs_alike_passes:
        _ALIKE.add(model)


def passes_alike(model: nn.Module) -> str:
    """The mark on it, or inside it, that wants as many passes on every rank; empty if there is none."""
    return next((_MARKS[module] for module in model.modules() if module in _ALIKE), "")


def unmark_model(model: nn.Module) -> None:
    _MARKS.pop(model, None)
    _ALIKE.discard(model)


def marked(model: nn.Module) -> str:
    """The mark on it or on a module inside it; empty if there is none."""
    return next((_MARKS[module] for module in model.modules() if module in _MARKS), "")
