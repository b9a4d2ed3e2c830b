"""What is here for a time where weights are lent, in the mean over actions: borrowed, older, and on its way."""

from collections.abc import Callable, Iterator

from torch import Tensor

__all__ = ["LentBytes"]


class LentBytes:
    """
    Args:
        tensors: those that are here now.
    """

    def __init__(self, tensors: Callable[[], Iterator[Tensor]]) -> None:
        self._tensors, self._sum, self._looks = tensors, 0, 0

    def look(self) -> None:
        """An action is about to run."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        self._sum += sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self._looks += 1

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._looks)
