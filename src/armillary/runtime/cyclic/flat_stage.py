"""The tensors of one stage side by side, as they travel round a ring.

One flat tensor per dtype. Gradients carry a count behind them for every parameter: how many workers used it. So a
parameter that nobody used keeps no gradient, and one that some used counts zero elsewhere, as in one process.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["FlatStage", "Flats"]

Flats = list[Tensor]  # one per dtype


class FlatStage:
    """Where the trainable parameters of a stage lie; holds no tensor of its own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            self._groups.setdefault((parameter.dtype, parameter.device), []).append(place)

    def pack_weights(self, weights: Sequence[Tensor]) -> Flats:
        """Copies of the weights, in the order of `parameters`."""
        return [torch.cat([weights[p].detach().reshape(-1) for p in places]) for places in self._groups.values()]

    def unpack_weights(self, flats: Flats) -> list[Tensor]:
        """Views into `flats`, in the order of `parameters`."""
        found: dict[int, Tensor] = {}
        for flat, places in zip(flats, self._groups.values(), strict=True):
            for place, part in zip(places, flat.split([self.parameters[p].numel() for p in places])):
                found[place] = part.view(self.parameters[place].shape)
        return [found[place] for place in range(len(self.parameters))]

    def pack_gradients(self, gradients: Sequence[Tensor | None]) -> Flats:
        """Copies of the gradients, then one count each: 1, or 0 (with zeros) for a parameter that was not used."""
        flats = []
        for (dtype, device), places in self._groups.items():
            parts = []
            for place in places:
                gradient = gradients[place]
                parts.append(torch.zeros_like(self.parameters[place]) if gradient is None else gradient)
            counts = torch.tensor([float(gradients[p] is not None) for p in places], dtype=dtype, device=device)
            flats.append(torch.cat([*(part.detach().reshape(-1) for part in parts), counts]))
        return flats

    def add_gradients(self, flats: Flats, gradients: Sequence[Tensor | None]) -> None:
        """Adds to sums that another worker packed, in place."""
        for flat, places in zip(flats, self._groups.values(), strict=True):
            *parts, counts = flat.split([*(self.parameters[p].numel() for p in places), len(places)])
            used = [gradients[place] is not None for place in places]
            for part, place in zip(parts, places):
                gradient = gradients[place]
                if gradient is not None:
                    part.add_(gradient.detach().reshape(-1))
            counts.add_(torch.tensor(used, dtype=flat.dtype, device=flat.device))

    def unpack_gradients(self, flats: Flats) -> dict[int, Tensor]:
        """Views of the sums that anybody added to, by their place in `parameters`."""
        found: dict[int, Tensor] = {}
        for flat, places in zip(flats, self._groups.values(), strict=True):
            *parts, counts = flat.split([*(self.parameters[p].numel() for p in places), len(places)])
            for place, part, count in zip(places, parts, counts.tolist()):
                if count:
                    found[place] = part.view(self.parameters[place].shape)
        return found
