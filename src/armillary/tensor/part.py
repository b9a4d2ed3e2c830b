"""A cut model as its user holds it: the data axis, clipping, and the whole state to save and to load."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.tensor.groups import ParameterCut, TensorMesh, is_rank_0, like, local_norms, plain

__all__ = ["Leaf", "Part"]


@dataclass(frozen=True)
class Leaf:
    """A parameter of the cut model: the name it has in the plain one, and how it is cut."""

    whole: str
    placement: ParameterCut


class Part:
    """This rank's part of a model that `tensor.cut` cut.

    Attributes:
        model: the model that was given, cut in place. way, roles: as taken.
        mesh: torch's DeviceMesh; mesh["data"] is what `fully_shard(..., mesh=...)` wants.
        data_group: the ranks with other samples and the same piece, for DDP and `armillary.parallelize`.
        data_rank, replicas: which samples of how many this rank's replica takes. All ranks of a replica read the same.
    """

    def __init__(
        self, model: nn.Module, mesh: TensorMesh, way: str, roles: Mapping[str, str], leaves: Mapping[str, Leaf]
    ) -> None:
        data = mesh.axes["data"]
        self.model, self.way, self.roles = model, way, dict(roles)
        self.mesh, self.data_group = mesh.device_mesh, data.group
        self.data_rank, self.replicas = data.index, data.size
        self._mesh, self._leaves = mesh, dict(leaves)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {axis.size}" for name, axis in self._mesh.axes.items())
        lines = [f"tensor: {self.way} over {sizes}; data rank {self.data_rank}"]
        return "\n".join([*lines, *(f"  {path}: {role}" for path, role in self.roles.items())])

    @property
    def sent_bytes(self) -> float:
        """By this rank's collectives of the room since the cut."""
        return self._mesh.sent_bytes

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ on the plain model: pieces count each once, copies once. Collective over
        the job; after the data axis has summed its gradients.

        Returns:
            The 2-norm of all gradients together, the same on every rank.
        """
        groups = dict[tuple[frozenset[str], type], list[Tensor]]()
        gradients = []
        for name, parameter in self.model.named_parameters():
            if (gradient := parameter.grad) is not None:
                gradients.append(gradient)
                groups.setdefault((self._leaf(name).placement.axes, type(gradient)), []).append(gradient)
        total = torch.zeros((), dtype=torch.float64)
        for (axes, _), those in groups.items():
            square = local_norms(those)
            for axis in self._mesh.over(sorted(axes)):
                square = axis.sum(square)
            total = total.to(square.device) + square
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return norm

    def whole_gradients(self) -> dict[str, Tensor]:
        """Collective over the job: on every rank, the plain model's gradients by name, on the CPU; the mean over
        replicas of what each has now. Not where the data axis spreads them (FSDP2, tables by row)."""
        data, found = self._mesh.axes["data"], dict[str, Tensor]()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                mean = data.sum(parameter.grad) / data.size
                found[self._leaf(name).whole] = self._whole(name, mean)
        return found

    def close(self) -> None:
        """Lets the groups go; the model is not to be used any more."""
        self._mesh.close()

    def whole_state(self, optimizer: Optimizer | None = None) -> dict[str, Any] | None:
        """Collective over the job.

        Returns:
            On rank 0 {"model": state_dict, "optimizer": state_dict} of the plain model and its optimizer, on the CPU,
            as `load_state_dict` of both and `load_whole` take them; None elsewhere. Without `optimizer`, the model's.

        Raises:
            ValueError: a table is spread by row, or a state of the optimizer has another shape than its parameter.
        """
        self._refuse_tables()
        model = {self._leaf(name).whole: self._whole(name, one) for name, one in self.model.state_dict().items()}
        found: dict[str, Any] = {"model": model}
        if optimizer is not None:
            names, told = self._names(optimizer), optimizer.state_dict()
            state = {
                index: {key: self._whole_slot(names[index], key, one) for key, one in slots.items()}
                for index, slots in told["state"].items()
            }
            found["optimizer"] = {**told, "state": state}
        return found if is_rank_0() else None

    def load_whole(self, state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
        """Collective over the job: what `whole_state` gave on any mesh, or a plain model's state, on every rank.

        Args:
            state: {"model": state_dict} with or without "optimizer"; every rank reads the file.

        Raises:
            ValueError: names or shapes do not fit; nothing was loaded.
        """
        self._refuse_tables()
        if not isinstance(state, Mapping) or "model" not in state:
            raise ValueError(
                'tensor: load_whole wants {"model": state_dict, ...} on every rank; let each read the file that rank 0 '
                "saved"
            )
        mine, given = self.model.state_dict(), state["model"]
        wanted = {self._leaf(name).whole for name in mine}
        if wanted != given.keys():
            raise ValueError(
                f"tensor: the state lacks {sorted(wanted - given.keys())} and has {sorted(given.keys() - wanted)} more"
            )
        for name, one in mine.items():
            whole, shape = given[self._leaf(name).whole], self._whole_shape(name, one)
            if whole.shape != shape:
                raise ValueError(
                    f"tensor: {self._leaf(name).whole} of the state is {tuple(whole.shape)}, the model wants "
                    f"{tuple(shape)}"
                )
        pieces = {name: self._piece(name, given[self._leaf(name).whole]) for name in mine}
        slots = self._slots_of(state["optimizer"], optimizer) if optimizer is not None else None
        with torch.no_grad():
            for name, one in pieces.items():
                mine[name].copy_(like(one, mine[name]))
        if optimizer is not None and slots is not None:
            optimizer.load_state_dict({**state["optimizer"], "state": slots})

    def _slots_of(self, told: Mapping[str, Any], optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        names, parameters = self._names(optimizer), dict(self.model.named_parameters())
        found = dict[int, dict[str, Any]]()
        for index, slots in told["state"].items():
            parameter = parameters[names[index]]
            found[index] = {
                key: like(self._piece(names[index], one), parameter)
                if isinstance(one, Tensor) and one.dim()
                else copy.deepcopy(one)
                for key, one in slots.items()
            }
        return found

    def _names(self, optimizer: Optimizer) -> list[str]:
        """By the number that the optimizer gives a parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        held: Sequence[nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]
        if any(one not in names for one in held):
            raise ValueError("tensor: the optimizer holds tensors that are not of the cut model; make it after the cut")
        return [names[one] for one in held]

    def _leaf(self, name: str) -> Leaf:
        return self._leaves.get(name, Leaf(name, ParameterCut(())))

    def _whole_shape(self, name: str, local: Tensor) -> torch.Size:
        shape = list(local.shape)
        for dim, names in enumerate(self._leaf(name).placement.cuts):
            shape[dim] *= self._mesh.pieces(names)
        return torch.Size(shape)

    def _whole(self, name: str, local: Tensor) -> Tensor:
        return self._mesh.whole(plain(local.detach()), self._leaf(name).placement).to("cpu", copy=True)

    def _whole_slot(self, name: str, key: str, one: Any) -> Any:
        if not isinstance(one, Tensor) or not one.dim():
            return copy.deepcopy(one)
        if one.shape != self.model.get_parameter(name).shape:
            raise ValueError(
                f"tensor: {key} of {name} has another shape than its parameter, so its pieces are not those of a "
                "plain state; take an optimizer that works element by element"
            )
        return self._whole(name, one)

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        return self._mesh.local(whole, self._leaf(name).placement)

    def _refuse_tables(self) -> None:
        for name, one in self.model.named_parameters():
            if hasattr(one, "reader"):
                raise ValueError(f"tensor: {name} is spread by row in a run; call run.close() first")
