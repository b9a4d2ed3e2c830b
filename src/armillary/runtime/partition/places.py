"""Where the parameters of a module stand in it, so that others can stand there for a while.

What `torch.func.functional_call` does, which looks for every place anew at each call: where a stage has many small
parameters, that took longer than its layers. A stage's places stay as they are, so they are found once. A parameter
that several modules share has several.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Places"]


class Places:
    """Of the parameters and buffers of a module, by the names that it gives them."""

    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        found: dict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for part in module.modules():
            for kept in (part._parameters, part._buffers):
                for key, tensor in kept.items():
                    if tensor is not None:
                        found[names[id(tensor)]].append((kept, key))
        self._found = dict(found)

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """These stand there meanwhile, by name; what stood there before comes back."""
        before = [(kept, key, kept[key]) for name in tensors for kept, key in self._found[name]]
        try:
            for name, tensor in tensors.items():
                for kept, key in self._found[name]:
                    kept[key] = tensor
            yield
        finally:
            for kept, key, tensor in before:
                kept[key] = tensor
