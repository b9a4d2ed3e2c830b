"""What a cut gives: a table, a curve, one plain model, and a folder with what each rank multiplies.

The folder holds index.json and a safetensors file a rank. A file has the tensors of its rank alone: per exchange what
leaves and what arrives, per layer the weights of its neurons over the inputs that it holds, then those that arrive.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from armillary.repurpose.cut_chain import CutChain, CutLayer, NeuronPlacement
from armillary.repurpose.layer_chain import Layer, LayerChain, described, made

__all__ = ["CurvePoint", "Shards", "index_of", "tensors_of"]

INDEX = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class CurvePoint:
    """
    Args of note:
        penalty: of a value that is sent; the search tried it for all layers.
        sent, plain: values a sample, by this cut and by one that gives every worker all inputs.
        measured: on the batches that judged.
    """

    penalty: float
    sent: int
    plain: int
    measured: float


@dataclass(frozen=True)
class Shards:
    """A model cut over workers.

    Args of note:
        curve: what was tried; the first point cuts nothing, so `measured` is that of the whole model.
        chosen: which point of the curve this is.
    """

    cut: CutChain
    curve: tuple[CurvePoint, ...]
    chosen: int

    def model(self) -> nn.Sequential:
        """In one process: neurons in the model's order, weights of zero where they are cut, BatchNorm folded."""
        return self.cut.model()

    def __str__(self) -> str:
        rows = [("layer", "neurons a worker", "values sent", "of a plain cut's", "weights kept")]
        lines = list(self.cut.traffic())
        for one in lines:
            share = f"{one.sent / one.plain:.2f}" if one.plain else "-"
            rows.append((one.name, " ".join(map(str, one.neurons)), f"{one.sent:,}", share, f"{one.kept:.0%}"))
        sent, plain = sum(one.sent for one in lines), sum(one.plain for one in lines)
        rows.append(("together", "", f"{sent:,}", f"{sent / plain:.2f}" if plain else "-", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
        before, after = self.curve[0].measured, self.curve[self.chosen].measured
        said = f"measured on the batches that judged: {before:.4g} before, {after:.4g} after"
        return "\n".join([*table, said, *self.cut.notes])

    def plot(self, path: str | Path) -> None:
        """Draws values sent, as a share of a plain cut's, against what was measured.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ModuleNotFoundError("shards.plot needs matplotlib: pip install 'armillary[plot]'") from None
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.subplots()
        points = sorted(self.curve, key=lambda one: one.sent)
        share = [one.sent / max(one.plain, 1) for one in points]
        axes.plot(share, [one.measured for one in points], "o-", color="#2563a8", label="tried")
        chosen = self.curve[self.chosen]
        axes.plot(
            chosen.sent / max(chosen.plain, 1), chosen.measured, "D", color="#c2570c", markersize=9, label="chosen"
        )
        axes.axhline(self.curve[0].measured, color="#777777", linestyle="--", label="whole model")
        axes.set(xlabel="values sent, of those that a plain cut sends", ylabel="measured", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)

    def save(self, folder: str | Path) -> None:
        """Writes index.json and a safetensors file a worker; the folder is made."""
        folder, cut = Path(folder), self.cut
        folder.mkdir(parents=True, exist_ok=True)
        index = {
            "format": FORMAT,
            "workers": cut.workers,
            "shares": cut.placement.shares,
            "is_spread": cut.placement.is_spread,
            "sample": cut.chain.sample,
            "head": [described(module) for module in cut.chain.head],
            "layers": [
                {
                    "name": one.layer.name,
                    "weight": list(one.layer.weight.shape),
                    "convolution": one.layer.convolution,
                    "after": [described(module) for module in one.layer.after],
                }
                for one in cut.layers
            ],
            "dtype": str(cut.layers[0].layer.weight.dtype).removeprefix("torch."),
            "exchanges": [{"counts": one.counts, "shape": one.shape} for one in cut.exchanges],
            "curve": [asdict(one) for one in self.curve],
            "chosen": self.chosen,
            "notes": cut.notes,
        }
        for rank in range(cut.workers):
            save_file(_part(cut, rank), _file(folder, rank, cut.workers))
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> "Shards":
        """The shards that `save` wrote there.

        Raises:
            ValueError: the folder holds none, or not all of them.
        """
        index = index_of(folder)
        parts = [tensors_of(folder, rank, index["workers"]) for rank in range(index["workers"])]
        layers = []
        for number, one in enumerate(index["layers"], 1):
            weight = torch.zeros(one["weight"], dtype=getattr(torch, index["dtype"]))
            bias, owners = weight.new_zeros(len(weight)), torch.zeros(len(weight), dtype=torch.long)
            for rank, part in enumerate(parts):
                rows = part[f"{number}.neurons"]
                owners[rows] = rank
                bias[rows] = part[f"{number}.bias"]
                weight[rows[:, None], _columns(part, number)] = part[f"{number}.weight"]
            layer = Layer(one["name"], weight, bias, one["convolution"], tuple(map(made, one["after"])))
            layers.append(CutLayer(layer, owners, _owners(parts, number), tuple(index["exchanges"][number]["shape"])))
        chain = LayerChain(
            tuple(map(made, index["head"])), tuple(one.layer for one in layers), tuple(index["sample"])
        )  # fmt: skip
        placement = NeuronPlacement(tuple(index["shares"]), index["is_spread"])
        last = len(layers) + 1
        shape, notes = tuple(index["exchanges"][last]["shape"]), tuple(index["notes"])
        cut = CutChain(chain, placement, tuple(layers), _owners(parts, last), shape, notes)
        return cls(cut, tuple(CurvePoint(**one) for one in index["curve"]), index["chosen"])


def index_of(folder: str | Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: there is none that this version reads.
    """
    path = Path(folder) / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"repurpose: {folder} holds no shards ({error}); want what shards.save wrote") from None
    if index.get("format") != FORMAT:
        raise ValueError(f"repurpose: {path} is of format {index.get('format')}; this version reads {FORMAT}")
    return index


def tensors_of(folder: str | Path, rank: int, workers: int) -> dict[str, Tensor]:
    """
    Raises:
        ValueError: the file of that rank is not there or broken.
    """
    path = _file(Path(folder), rank, workers)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except Exception as error:
        raise ValueError(f"repurpose: {path} cannot be read ({error}); save the shards again") from None


def _file(folder: Path, rank: int, workers: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{workers:05d}.safetensors"


def _part(cut: CutChain, rank: int) -> dict[str, Tensor]:
    """By exchange ("0" from rank 0, "1" before the first layer, ...): what leaves, what is held, what arrives."""
    part: dict[str, Tensor] = {}
    for number, exchange in enumerate(cut.exchanges):
        part[f"{number}.leaving"] = exchange.leaving(rank)
        part[f"{number}.held"], part[f"{number}.arriving"] = exchange.held(rank), exchange.arriving(rank)
    for number, one in enumerate(cut.layers, 1):
        neurons = (one.owners == rank).nonzero()[:, 0]
        part[f"{number}.neurons"], part[f"{number}.bias"] = neurons, one.layer.bias[neurons]
        part[f"{number}.weight"] = one.layer.weight[neurons[:, None], _columns(part, number)]
    return {name: tensor.contiguous() for name, tensor in part.items()}


def _columns(part: dict[str, Tensor], number: int) -> Tensor:
    """The inputs whose weights a rank has, in their order there."""
    return torch.cat([part[f"{number}.held"], part[f"{number}.arriving"]])


def _owners(parts: list[dict[str, Tensor]], number: int) -> Tensor:
    held = [part[f"{number}.held"] for part in parts]
    owners = torch.zeros(sum(map(len, held)), dtype=torch.long)
    for rank, neurons in enumerate(held):
        owners[neurons] = rank
    return owners
