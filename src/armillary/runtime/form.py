"""The form of a nest of tensors, as text: structure, shapes, dtypes, which tensors ask for a gradient, constants.

A receiver makes room by it. It travels as JSON, so that what arrives is data and is never carried out.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

__all__ = ["Form", "TensorForm", "form_of"]

CONSTANTS = (bool, int, float, str, type(None))


class TensorForm(NamedTuple):
    """asks: for a gradient. is_coded: whether a codec of the edge writes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    asks: bool
    is_coded: bool = False


@dataclass(frozen=True)
class Form:
    """leaves: a `TensorForm`, or the constant itself."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def to_json(self) -> str:
        """
        Raises:
            TypeError: a leaf or a container that JSON cannot say; the message says what can.
        """
        leaves = [
            {
                "shape": leaf.shape,
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "asks": leaf.asks,
                **({"coded": True} if leaf.is_coded else {}),
            }
            if isinstance(leaf, TensorForm)
            else {"is": _constant(leaf)}
            for leaf in self.leaves
        ]
        return json.dumps({"leaves": leaves, **_structure(self.spec)})

    @classmethod
    def from_json(cls, text: str) -> "Form":
        fields = json.loads(text)
        leaves = tuple(
            leaf["is"]
            if "is" in leaf
            else TensorForm(tuple(leaf["shape"]), getattr(torch, leaf["dtype"]), leaf["asks"], leaf.get("coded", False))
            for leaf in fields["leaves"]
        )
        if "spec" in fields:
            return cls(leaves, treespec_loads(fields["spec"]))
        return cls(leaves, tree_flatten(_built(fields["nest"]))[1])


def form_of(leaves: list[Any], spec: TreeSpec) -> Form:
    """Of a nest taken apart."""
    return Form(
        tuple(
            TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ),
        spec,
    )


def _constant(leaf: Any) -> Any:
    if type(leaf) not in CONSTANTS:
        raise TypeError(
            f"stages: a {type(leaf).__name__} cannot cross from one process to another; want tensors, numbers, text, "
            f"booleans or None in tuples, lists and dicts"
        )
    return leaf


def _structure(spec: TreeSpec) -> dict[str, Any]:
    """As torch writes it; torch has no words for named tuples, so these go by the name of their class."""
    try:
        return {"spec": treespec_dumps(spec)}
    except NotImplementedError:
        return {"nest": _named(tree_unflatten(range(spec.num_leaves), spec))}


def _named(nest: Any) -> Any:
    match nest:
        case int():
            return nest
        case dict():
            return {"dict": [[key, _named(part)] for key, part in nest.items()]}
        case list():
            return {"list": [_named(part) for part in nest]}
        case tuple() if hasattr(nest, "_fields"):
            kind = type(nest)
            return {"module": kind.__module__, "class": kind.__qualname__, "parts": [_named(part) for part in nest]}
        case tuple():
            return {"tuple": [_named(part) for part in nest]}
    raise TypeError(
        f"stages: a {type(nest).__name__} cannot cross from one process to another beside a named tuple; want tuples, "
        f"lists and dicts"
    )


def _built(nest: Any) -> Any:
    if isinstance(nest, int):
        return nest
    if "dict" in nest:
        return {key: _built(part) for key, part in nest["dict"]}
    if "list" in nest:
        return [_built(part) for part in nest["list"]]
    if "tuple" in nest:
        return tuple(_built(part) for part in nest["tuple"])
    kind: Any = sys.modules.get(nest["module"])
    for name in nest["class"].split("."):
        kind = getattr(kind, name, None)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise RuntimeError(
            f"stages: another process sent a named tuple {nest['module']}.{nest['class']}, which is none here; define "
            f"it at the top of a module that every process imports"
        )
    return kind(*(_built(part) for part in nest["parts"]))
