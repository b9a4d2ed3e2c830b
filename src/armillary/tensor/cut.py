"""Cuts a region of a model over the axes of a mesh. What is left in it are modules with ordinary local parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from armillary.models.structure import mark_model, marked
from armillary.tensor.attention import CutAttention
from armillary.tensor.groups import ParameterCut, TensorMesh, open_mesh, ranks
from armillary.tensor.inside import enter_region
from armillary.tensor.linear import ColumnLinear, GatheredLinear, Gathering, RowLinear
from armillary.tensor.mesh_plan import MeshPlan
from armillary.tensor.norms import CutLayerNorm, CutRMSNorm
from armillary.tensor.part import Leaf, Part
from armillary.tensor.region import Region
from armillary.tensor.roles import FUSED, WHOLE, role_of
from armillary.tensor.ways import WAYS, CutWay, pieces

__all__ = ["Examined", "carry_out", "cut", "examined"]

MARK = (
    "is cut by armillary.tensor, so all ranks of a replica must make the same passes; leave out batches and loss, and "
    "the schedule, and plan from the first steps of your own loop"
)


def cut(
    model: nn.Module,
    plan: MeshPlan | None = None,
    *,
    region: str = "",
    way: str = "",
    mesh: Mapping[str, int] | None = None,
    roles: Mapping[str, str] | None = None,
) -> Part:
    """Cuts `model` in place. Every rank calls it, with the same model, before the optimizer is made.

    Args:
        model: plain, whole, and alike on all ranks.
        plan: what `tensor.plan` gave; in place of all that follows.
        region: path of a Sequential or ModuleList whose children are called one after another, or of one module. Each
            maps a tensor (samples, [tokens,] features) to one of the same shape; tokens come first where
            nn.MultiheadAttention inside says batch_first=False.
        way: "columns_rows", "2d", "2.5d", "3d", "heads", "ring", or "data", which cuts nothing.
        mesh: axis -> size, as in {"data": 2, "tensor": 4}: the axes of the way, and "data". Their product is the number
            of ranks; the last axis joins neighbouring ranks.
        roles: glob pattern of paths -> "column", "row", "qkv" or "gate_up" (columns of three or two matrices in one),
            or "whole"; for linear layers whose names are not known.

    Raises:
        ValueError: the model, the mesh or the roles do not fit; nothing was changed.
    """
    if plan is not None:
        region, way, mesh, roles = plan.region, plan.way, plan.mesh, plan.roles
    sizes = _sizes(way, mesh or {})
    found = examined(model, region, way, sizes, roles or {})
    opened = open_mesh(sizes, next(model.parameters()).device.type)
    return Part(model, opened, way, found.roles, carry_out(model, found, way, opened))


def carry_out(model: nn.Module, found: "Examined", way: str, mesh: TensorMesh) -> dict[str, Leaf]:
    """Cuts what was examined, in place."""
    leaves = dict[str, Leaf]()
    if not WAYS[way].axes:
        return leaves
    inside = Region(found.region, WAYS[way], mesh, found.rows_dim, _draws(model))
    for path, attention in found.attentions.items():
        _cut_attention(path, attention, leaves)
    modules = dict(model.named_modules())
    for path, role in found.all_roles.items():
        _cut_linear(path, modules[path], role, inside, leaves)
    for path in found.norms:
        _cut_norm(path, modules[path], inside, leaves)
    enter_region(inside, found.chain)
    for module in (model, *found.chain.values()):
        mark_model(module, MARK, needs_alike_passes=True)
    return leaves


@dataclass(frozen=True)
class Examined:
    """What is in a region. roles: of linear layers outside nn.MultiheadAttention."""

    region: str
    chain: dict[str, nn.Module]
    roles: dict[str, str]
    attentions: dict[str, nn.MultiheadAttention]
    norms: list[str]
    rows_dim: int

    @property
    def all_roles(self) -> dict[str, str]:
        return {**self.roles, **{f"{path}.in_proj": "qkv" for path in self.attentions}}


def examined(model: nn.Module, region: str, way: str, sizes: Mapping[str, int], roles: Mapping[str, str]) -> Examined:
    """
    Raises:
        ValueError: what cannot be cut this way over axes of these sizes.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(f"tensor.cut: {path or 'the model'} is compiled; cut the plain model first")
    if mark := marked(model):
        raise ValueError(f"tensor.cut: the model {mark}")
    chain = _chain(model, region)
    found = Examined(region, chain, {}, {}, [], _rows_dim(chain))
    for path, one in chain.items():
        _look(path, one, found, WAYS[way], roles)
    if complaint := next(_complaints(model, found, WAYS[way], sizes), ""):
        raise ValueError(f"tensor.cut: {complaint}")
    return found


def _sizes(way: str, mesh: Mapping[str, int]) -> dict[str, int]:
    if way not in WAYS:
        raise ValueError(f"tensor.cut: no way {way!r}; want one of {', '.join(WAYS)}")
    axes = WAYS[way].axes
    sizes = {"data": mesh.get("data", 1), **{name: mesh[name] for name in axes if name in mesh}}
    if {*mesh} - {"data"} != {*axes}:
        raise ValueError(f"tensor.cut: {way} wants the axes data, {', '.join(axes)}, got {', '.join(mesh) or 'none'}")
    square = {name: size for name, size in sizes.items() if name not in ("data", "depth")}
    if len({*square.values()}) > 1:
        shape = "a cube" if way == "3d" else "a square"
        raise ValueError(f"tensor.cut: {way} wants axes of one size, {shape}, got {square}")
    product = pieces(sizes, sizes)
    if product != ranks():
        raise ValueError(
            f"tensor.cut: the mesh {sizes} has {product} ranks, the job has {ranks() or 'none'}; start it by torchrun "
            "with as many, or choose sizes whose product they are"
        )
    return sizes


def _chain(model: nn.Module, region: str) -> dict[str, nn.Module]:
    try:
        top = model.get_submodule(region)
    except AttributeError:
        raise ValueError(f"tensor.cut: the model has no module {region!r}") from None
    if isinstance(top, nn.Sequential | nn.ModuleList):
        chain = {f"{region}.{name}" if region else name: module for name, module in top.named_children()}
    else:
        chain = {region: top}
    if not chain:
        raise ValueError(f"tensor.cut: region {region!r} holds no module")
    return chain


def _rows_dim(chain: Mapping[str, nn.Module]) -> int:
    attentions = [one for top in chain.values() for one in top.modules() if isinstance(one, nn.MultiheadAttention)]
    kinds = {one.batch_first for one in attentions}
    if len(kinds) > 1:
        raise ValueError("tensor.cut: some nn.MultiheadAttention in the region are batch_first and some are not")
    return 1 if kinds == {False} else 0


def _look(path: str, module: nn.Module, found: Examined, way: CutWay, roles: Mapping[str, str]) -> None:
    if isinstance(module, nn.MultiheadAttention):
        found.attentions[path] = module
        if way.linears:
            found.roles[f"{path}.out_proj"] = "row"
        return
    if way.linears and type(module) is nn.Linear:
        found.roles[path] = role_of(path, roles)
    if way.features and type(module) in (nn.LayerNorm, nn.RMSNorm):
        found.norms.append(path)
    for name, child in module.named_children():
        _look(f"{path}.{name}" if path else name, child, found, way, roles)


def _complaints(model: nn.Module, found: Examined, way: CutWay, sizes: Mapping[str, int]) -> Iterator[str]:
    inside = {f"{top}.{name}" if top else name for top, one in found.chain.items() for name, _ in one.named_modules()}
    inside = {path.rstrip(".") for path in inside}
    yield from _tied(model, inside)
    modules = dict(model.named_modules())
    for path in sorted(inside):
        module = modules[path]
        yield from _of_module(path, module, found, way)
    for path, one in found.attentions.items():
        heads = pieces(sizes, way.cuts_heads)
        if one.num_heads % heads:
            fits = [many for many in range(1, one.num_heads + 1) if one.num_heads % many == 0]
            yield f"{path} has {one.num_heads} heads, which {heads} ranks do not divide; want one of {fits}"
        if not one._qkv_same_embed_dim or one.bias_k is not None or one.add_zero_attn:
            yield f"{path} has kdim, vdim, add_bias_kv or add_zero_attn; want a plain nn.MultiheadAttention"
    for path, role in found.roles.items():
        if role not in (*FUSED, WHOLE):
            yield f"roles: {role!r} of {path} is none of {', '.join((*FUSED, WHOLE))}"
        elif role == WHOLE and way.features:
            yield (
                f"{path} has no role, and this way cuts every linear layer; give roles={{{path!r}: ...}} as "
                f"{', '.join(FUSED)}"
            )
        elif role != WHOLE:
            rule, module = way.linears["row" if role == "row" else "column"], modules[path]
            many = (pieces(sizes, rule.outputs) * FUSED[role], pieces(sizes, rule.inputs))
            for size, by, what in zip(module.weight.shape, many, ("outputs", "inputs"), strict=True):
                if size % by:
                    yield f"{path} has {size} {what}, which are not divisible by {by}, as this mesh wants"
    for path in found.norms:
        shape, by = modules[path].normalized_shape, pieces(sizes, way.features)
        if len(shape) != 1 or shape[0] % by:
            yield f"{path} normalizes {tuple(shape)}; want one dimension that {by} ranks divide"


def _of_module(path: str, module: nn.Module, found: Examined, way: CutWay) -> Iterator[str]:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        yield f"{path} is a {type(module).__name__}, whose statistics hang on all samples; it cannot stand in a region"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield f"{path} is a table; keep tables outside the region"
    if isinstance(module, nn.Linear) and (module._forward_hooks or module._forward_pre_hooks) and path in found.roles:
        yield f"{path} has hooks, which would see pieces; register them after the cut"
    own = [name for name, _ in module.named_parameters(recurse=False)]
    known = path in found.roles or path in found.norms or path in found.attentions
    if way.features and own and not known:
        yield (
            f"{path} is a {type(module).__name__} with parameters of its own ({', '.join(own)}), which {way.axes} "
            "would cut; this way knows nn.Linear, nn.LayerNorm, nn.RMSNorm and nn.MultiheadAttention"
        )
    if any(getattr(one, "__tensor_flatten__", None) for _, one in module.named_parameters(recurse=False)):
        yield f"{path} is distributed already; cut first, then wrap or shard"


def _tied(model: nn.Module, inside: set[str]) -> Iterator[str]:
    seen = dict[Tensor, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = seen.setdefault(parameter, name)
        if other != name and {name.rpartition(".")[0], other.rpartition(".")[0]} & inside:
            yield f"{name} is tied to {other}, and one of them is inside the region; untie them, or choose another"


def _draws(model: nn.Module) -> bool:
    return any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 for one in model.modules())


def _cut_attention(path: str, module: Any, leaves: dict[str, Leaf]) -> None:
    """Its projection becomes a linear layer of its own, first among its parameters as before."""
    projection = nn.Linear(1, 1, bias=False)
    projection.weight = module.in_proj_weight
    projection.in_features, projection.out_features = module.embed_dim, 3 * module.embed_dim
    if module.in_proj_bias is not None:
        projection.register_parameter("bias", module.in_proj_bias)
    output: Any = module.out_proj
    output.__class__ = nn.Linear
    del module.out_proj
    module.in_proj_weight = module.in_proj_bias = None  # torch's fast path asks for the bias, and goes by
    module.in_proj, module.out_proj = projection, output
    module.__class__ = CutAttention
    for kind, one in projection.named_parameters():
        whole = ParameterCut(((),) * one.dim())
        leaves[f"{path}.in_proj.{kind}"] = Leaf(f"{path}.in_proj_{kind}", whole)


def _cut_linear(path: str, module: nn.Module, role: str, inside: Region, leaves: dict[str, Leaf]) -> None:
    way, mesh = inside.way, inside.mesh
    if role == WHOLE or not way.linears:
        return
    rule = way.linears["row" if role == "row" else "column"]
    linear: Any = module
    if rule.gather_weight:
        axes = mesh.axes
        linear.__class__ = GatheredLinear
        linear._gathering = Gathering(
            role != "row",
            axes[rule.gather_x], -1 if rule.gathered == "features" else inside.rows_dim, axes[rule.gather_weight],
            axes[rule.scatter] if rule.scatter else None, inside.rows_dim, tuple(mesh.over(rule.sum_weight)),
            tuple(mesh.over(rule.sum_bias)),
        )  # fmt: skip
    elif role == "row":
        linear.__class__, linear._axis = RowLinear, inside.tensor_axes[0]
    else:
        linear.__class__, linear._copied = ColumnLinear, inside.copied
    fused = FUSED[role]
    _localise(path, linear, "weight", ParameterCut((rule.outputs, rule.inputs), fused), mesh, leaves)
    if linear.bias is not None:
        _localise(path, linear, "bias", ParameterCut((rule.outputs,), fused), mesh, leaves)


def _cut_norm(path: str, module: nn.Module, inside: Region, leaves: dict[str, Leaf]) -> None:
    way, mesh = inside.way, inside.mesh
    norm: Any = module
    norm.__class__ = CutLayerNorm if type(module) is nn.LayerNorm else CutRMSNorm
    norm._features, norm._alike = mesh.axes[way.features[0]], tuple(mesh.over(way.sum_norms))
    norm._fits_between = way.heads == way.features
    for kind in [name for name, _ in norm.named_parameters()]:
        _localise(path, norm, kind, ParameterCut((way.features,)), mesh, leaves)


def _localise(
    path: str, module: nn.Module, kind: str, placement: ParameterCut, mesh: TensorMesh, leaves: dict[str, Leaf]
) -> None:
    """The parameter of that name becomes this rank's piece."""
    name, whole = f"{path}.{kind}", getattr(module, kind)
    piece = nn.Parameter(mesh.local(whole.detach(), placement), requires_grad=whole.requires_grad)
    setattr(module, kind, piece)
    plain = leaves[name].whole if name in leaves else name
    leaves[name] = Leaf(plain, placement)
