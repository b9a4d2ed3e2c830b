"""A model read as a chain of layers: each a Linear or Conv2d, with the modules behind it that treat every neuron alone.

A neuron is an output feature of a Linear, or an output channel of a Conv2d. Whatever acts on each neuron by itself can
run on the worker that owns the neuron, so only the inputs of a Linear or Conv2d ever cross workers. Modules that mix
neurons in another way are refused by name. BatchNorm is folded into the layer before it, with its running statistics.
"""

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

__all__ = ["Layer", "LayerChain", "described", "made", "read"]

# The modules that treat each neuron alone, with the options to make them anew, in the order of their function's own.
NEURON_BY_NEURON: dict[type[nn.Module], tuple[str, ...]] = {
    nn.ReLU: (), nn.ReLU6: (), nn.SELU: (), nn.SiLU: (), nn.Mish: (), nn.Sigmoid: (), nn.Tanh: (), nn.Softsign: (),
    nn.Hardswish: (), nn.Hardsigmoid: (), nn.LogSigmoid: (), nn.GELU: ("approximate",), nn.ELU: ("alpha",),
    nn.CELU: ("alpha",), nn.LeakyReLU: ("negative_slope",), nn.Hardtanh: ("min_val", "max_val"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    nn.AvgPool2d: ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    nn.AdaptiveAvgPool2d: ("output_size",), nn.Flatten: ("start_dim", "end_dim"),
}  # fmt: skip
NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)  # in evaluation mode
FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, F.relu6: nn.ReLU6, F.selu: nn.SELU, F.silu: nn.SiLU, F.mish: nn.Mish,
    torch.sigmoid: nn.Sigmoid, F.sigmoid: nn.Sigmoid, torch.tanh: nn.Tanh, F.tanh: nn.Tanh, F.gelu: nn.GELU,
    F.elu: nn.ELU, F.leaky_relu: nn.LeakyReLU, F.hardtanh: nn.Hardtanh,
    F.hardswish: nn.Hardswish, F.max_pool2d: nn.MaxPool2d, torch.max_pool2d: nn.MaxPool2d, F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d, torch.flatten: nn.Flatten, F.dropout: nn.Dropout,
    F.dropout2d: nn.Dropout2d,
}  # fmt: skip
METHODS: dict[Any, type[nn.Module]] = {
    "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "flatten": nn.Flatten
}  # fmt: skip
MIXES = {  # what these do to neurons, in the words of a refusal
    nn.modules.batchnorm._BatchNorm: "follows no Linear or Conv2d directly, so it cannot be folded",
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax), "is a norm over neurons"),
    nn.MultiheadAttention: "is attention",
}
WANTED = (
    "want a chain of Linear, Conv2d, elementwise activations, BatchNorm behind a Linear or Conv2d, pooling and Flatten"
)
AS_THE_MODEL = 1e-4  # of the largest output: how far a chain may be from its model, by rounding alone


@dataclass(frozen=True)
class Layer:
    """
    Args of note:
        name: of its module in the model.
        weight: (neurons, inputs), of a Conv2d (neurons, inputs, height, width), with BatchNorm folded in.
        bias: (neurons,); zeros where the module had none.
        convolution: stride, padding and dilation; None: a Linear.
        after: what follows it neuron by neuron, up to the next layer.
    """

    name: str
    weight: Tensor
    bias: Tensor
    convolution: Mapping[str, Any] | None
    after: tuple[nn.Module, ...] = ()

    def module(self, weight: Tensor, bias: Tensor) -> nn.Module:
        """A Linear or Conv2d like this layer's with other weights, perhaps of fewer neurons and inputs."""
        neurons, inputs = weight.shape[:2]
        new: nn.Module
        if self.convolution is None:
            new = nn.Linear(inputs, neurons, device="meta")
        else:
            new = nn.Conv2d(inputs, neurons, weight.shape[2:], **self.convolution, device="meta")  # type: ignore[arg-type]
        new.weight, new.bias = (nn.Parameter(value, requires_grad=False) for value in (weight, bias))
        return new

    def columns(self, x: Tensor) -> Tensor:
        """(samples * output positions, inputs * kernel elements): what each product of the layer multiplies."""
        if self.convolution is None:
            return x
        unfolded = F.unfold(x, self.weight.shape[2:], **self.convolution)
        return unfolded.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class LayerChain:
    """head: modules before the first layer. sample: the shape of one input of the model, without the batch."""

    head: tuple[nn.Module, ...]
    layers: tuple[Layer, ...]
    sample: tuple[int, ...]

    def model(self, weights: Iterable[tuple[Tensor, Tensor]]) -> nn.Sequential:
        """The chain in plain modules with these (weight, bias) of its layers."""
        modules = list(self.head)
        for layer, (weight, bias) in zip(self.layers, weights, strict=True):
            modules += [layer.module(weight, bias), *layer.after]
        return nn.Sequential(*modules).eval()


def read(model: nn.Module, x: Tensor) -> LayerChain:
    """
    Args:
        x: an input of the model with its batch: the chain must give the model's own output for it.

    Raises:
        ValueError: the model is no chain of layers; the message names the first module that is none.
    """
    whole = copy.deepcopy(model).cpu().eval()
    head: list[nn.Module] = []
    layers: list[Layer] = []
    for name, module in _in_a_row(whole):
        if isinstance(module, NOTHING):
            continue
        if isinstance(module, nn.Linear | nn.Conv2d):
            layers.append(_layer(name, module))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and layers and not layers[-1].after:
            layers[-1] = _folded(layers[-1], name, module)
        elif type(module) in NEURON_BY_NEURON:
            new = made(described(module))
            if isinstance(new, nn.Flatten) and (new.start_dim != 1 or new.end_dim not in (-1, 3)):
                _refuse(name, module, "flattens other than (batch, channels, height, width) to (batch, features)")
            if layers:
                layers[-1] = Layer(**vars(layers[-1]) | {"after": (*layers[-1].after, new)})
            else:
                head.append(new)
        else:
            _refuse(name, module, next((why for kind, why in MIXES.items() if isinstance(module, kind)), "is no layer"))
    if not layers:
        raise ValueError(f"repurpose: the model has no Linear and no Conv2d; {WANTED}")
    chain = LayerChain(tuple(head), tuple(layers), tuple(x.shape[1:]))
    _refuse_another_output(chain, whole, x)
    _refuse_other_shapes(chain, x)
    return chain


def described(module: nn.Module) -> dict[str, Any]:
    """A module that treats each neuron alone, as plain data."""
    options = {name: getattr(module, name) for name in NEURON_BY_NEURON[type(module)]}
    return {"kind": type(module).__name__, **options}


def made(description: Mapping[str, Any]) -> nn.Module:
    """The module of a description. It works out of place, whatever its original did."""
    options = {name: value for name, value in description.items() if name != "kind"}
    module: nn.Module = getattr(nn, description["kind"])(**options)
    return module


def _in_a_row(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every operation, in order; functions as the modules that do the same."""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        raise ValueError(
            f"repurpose: the forward of {type(model).__name__} cannot be followed ({error}); {WANTED}"
        ) from error
    last: fx.Node | None = None
    for node in graph.nodes:
        if last is not None and node.op != "placeholder" and node.all_input_nodes != [last]:
            known = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
            why = "a residual sum" if node.target in (operator.add, operator.iadd, torch.add) else "paths that join"
            raise ValueError(
                f"repurpose: {known!r} takes {[str(one) for one in node.all_input_nodes]}: {why}; {WANTED}"
            )
        if node.op == "placeholder" and last is not None:
            raise ValueError(f"repurpose: the forward takes {last} and {node}; want one tensor")
        if node.op == "call_module":
            yield str(node.target), model.get_submodule(str(node.target))
        elif node.op in ("call_function", "call_method"):
            yield node.name, _as_module(node)
        last = node


def _as_module(node: fx.Node) -> nn.Module:
    kind = (FUNCTIONS | METHODS).get(node.target)
    if kind is None:
        known = getattr(node.target, "__name__", node.target)
        raise ValueError(f"repurpose: {known!r} (at {node.name}) is no layer; {WANTED}")
    if issubclass(kind, NOTHING):
        if node.kwargs.get("training", len(node.args) < 3 or node.args[2]):
            raise ValueError(f"repurpose: {node.name} drops values out in evaluation mode; pass training=self.training")
        return nn.Identity()
    names = NEURON_BY_NEURON[kind]
    given = dict(zip(names, node.args[1:])) | {name: node.kwargs[name] for name in names if name in node.kwargs}
    if kind is nn.Flatten:
        given = {"start_dim": 0} | given  # the function begins at the batch, unlike the module
    return kind(**given)


def _layer(name: str, module: nn.Linear | nn.Conv2d) -> Layer:
    weight = module.weight.detach().clone()
    if weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"repurpose: the weights of {name!r} are {weight.dtype}; want float32 or float64: model.float()"
        )
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().clone()
    if isinstance(module, nn.Linear):
        return Layer(name, weight, bias, None)
    if module.groups != 1 or module.padding_mode != "zeros":
        _refuse(name, module, "has groups or pads other than by zeros")
    padding: Any = 0 if module.padding == "valid" else module.padding
    if padding == "same":
        spans = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
        if any(span % 2 for span in spans):
            _refuse(name, module, "pads one side more than the other")
        padding = tuple(span // 2 for span in spans)
    return Layer(name, weight, bias, {"stride": module.stride, "padding": padding, "dilation": module.dilation})


def _folded(layer: Layer, name: str, norm: nn.modules.batchnorm._BatchNorm) -> Layer:
    if norm.running_mean is None or norm.running_var is None:
        _refuse(name, norm, "keeps no running statistics")
    scale = (norm.running_var + norm.eps).rsqrt()
    shift = -norm.running_mean * scale
    if norm.affine:
        scale, shift = scale * norm.weight.detach(), shift * norm.weight.detach() + norm.bias.detach()
    weight = layer.weight * scale.view(-1, *[1] * (layer.weight.dim() - 1))
    return Layer(layer.name, weight, layer.bias * scale + shift, layer.convolution)


def _refuse_another_output(chain: LayerChain, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        want, got = model(x), chain.model([(layer.weight, layer.bias) for layer in chain.layers])(x)
    if want.shape != got.shape or not torch.allclose(got, want, rtol=0, atol=AS_THE_MODEL * float(want.abs().max())):
        raise ValueError(
            f"repurpose: the layers of {type(model).__name__} in a row give another output than its forward; a hook or "
            "a layer of its own changes it; take it away, or put it into the chain"
        )


@torch.no_grad()
def _refuse_other_shapes(chain: LayerChain, x: Tensor) -> None:
    x = nn.Sequential(*chain.head)(x)
    for layer in chain.layers:
        wanted = "(batch, features)" if layer.convolution is None else "(batch, channels, height, width)"
        if x.dim() != wanted.count(",") + 1:
            raise ValueError(f"repurpose: {layer.name!r} is given {tuple(x.shape)}; want {wanted}")
        x = nn.Sequential(layer.module(layer.weight, layer.bias), *layer.after)(x)


def _refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    raise ValueError(f"repurpose: {type(module).__name__} {name!r} {why}; {WANTED}")
