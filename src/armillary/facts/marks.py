"""What is being done to a model, marked on it, so that what does not go with it can refuse by name."""

import weakref

from torch import nn

__all__ = ["mark_model", "marked", "unmark_model"]

_MARKS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def mark_model(model: nn.Module, what: str) -> None:
    """what: in words that follow "the model", with the remedy."""
    _MARKS[model] = what


def unmark_model(model: nn.Module) -> None:
    _MARKS.pop(model, None)


def marked(model: nn.Module) -> str:
    """The mark on it or on a module inside it; empty if there is none."""
    return next((_MARKS[module] for module in model.modules() if module in _MARKS), "")
