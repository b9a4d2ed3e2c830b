"""Optimizers as they are found elsewhere, in a few lines each.

`MIXING` steps of a matrix are not those of its rows apart; `BY_ROW` steps are. `WHOLE` cannot be given other tensors in
place of a model's parameters, or cannot be tried. Each is made over parameters.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.optim import SGD, Optimizer


class Plain(Optimizer):
    """`changed(parameter, gradient, state)` gives the step of each parameter; `before(gradients)` sees all of them."""

    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, {"lr": lr, **more})

    def before(self, gradients):
        return 1.0

    def changed(self, parameter, gradient, state):
        return gradient

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = self.before([p.grad for p in held])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * factor * self.changed(p, p.grad, self.state[p]))


def norm_of(gradients):
    return torch.sqrt(sum((one.double() ** 2).sum() for one in gradients))


class LayerProjected(Plain):
    """AdamP: no radial step where a gradient is nearly orthogonal to the whole tensor."""

    def changed(self, w, g, state):
        if w.dim() < 2 or functional.cosine_similarity(w.flatten(), g.flatten(), dim=0).abs() >= 0.1 / w.numel() ** 0.5:
            return g
        n = w / (w.norm() + 1e-8)
        return g - n * (n * g).sum()


class ChannelProjected(Plain):
    """AdamP's other view: each row, where all of them are nearly orthogonal."""

    def changed(self, w, g, state):
        if w.dim() < 2:
            return g
        w2, g2 = w.flatten(1), g.flatten(1)
        if functional.cosine_similarity(w2, g2, dim=1).abs().max() >= 0.1 / w2.shape[1] ** 0.5:
            return g
        n = w2 / (w2.norm(dim=1, keepdim=True) + 1e-8)
        return (g2 - n * (n * g2).sum(1, keepdim=True)).view_as(g)


class Clipped(Plain):
    """By the norm of all gradients, above a threshold."""

    limit = 8.0

    def before(self, gradients):
        return min(1.0, self.limit / (float(norm_of(gradients)) + 1e-30))


class ClippedHigh(Clipped):
    limit = 3e4


class Lifted(Plain):
    """Gradients whose norm is small are made larger."""

    def before(self, gradients):
        return max(1.0, 1e-4 / (float(norm_of(gradients)) + 1e-30))


class LargestOfAll(Plain):
    """Scaled by the largest number of all."""

    def before(self, gradients):
        return 1.0 / float(1.0 + max(one.abs().max() for one in gradients))


class Trust(Plain):
    """LARS and LAMB: as long as the tensor."""

    def changed(self, w, g, state):
        return g * (w.norm() / (g.norm() + 1e-12)) if w.norm() > 0 else g


class Cautious(Plain):
    """Only where momentum and gradient agree, the others scaled up for it."""

    def changed(self, w, g, state):
        momentum = state.setdefault("momentum", torch.zeros_like(w)).lerp_(g, 0.1)
        mask = (momentum * g > 0).to(g.dtype)
        return momentum * mask / mask.mean().clamp(min=1e-3)


class Factored(Plain):
    """State of rows and columns where a matrix is large, and None where it is not."""

    least = 16

    def changed(self, w, g, state):
        if not state:
            large = w.dim() == 2 and min(w.shape) >= self.least
            state["row"], state["column"] = (
                (w.new_zeros(w.shape[0], 1), w.new_zeros(1, w.shape[1])) if large else (None, None)
            )
            state["whole"] = None if large else torch.zeros_like(w)
        square = g**2 + 1e-30
        if state["whole"] is not None:
            return g / state["whole"].lerp_(square, 0.1).sqrt()
        state["row"].lerp_(square.mean(1, keepdim=True), 0.1)
        state["column"].lerp_(square.mean(0, keepdim=True), 0.1)
        return g / (state["row"] * state["column"] / state["row"].mean()).sqrt()


class FactoredLate(Factored):
    least = 128


class Blocks(Plain):
    """Momentum in 8 bits, in blocks of 256 numbers where a tensor has 4,096."""

    def changed(self, w, g, state):
        momentum = 0.9 * state.get("momentum", torch.zeros_like(w)) + g
        if w.numel() >= 4096 and w.numel() % 256 == 0:
            blocks = momentum.view(-1, 256)
            scale = blocks.abs().amax(1, keepdim=True) / 127 + 1e-30
            momentum = ((blocks / scale).round() * scale).view_as(w)
        state["momentum"] = momentum
        return momentum


class Late(Plain):
    """Mixes in every tenth step, or from the 25th on."""

    every, first = 10, 0

    def changed(self, w, g, state):
        state["step"] = state.get("step", 0) + 1
        mixes = state["step"] % self.every == 0 and state["step"] > self.first
        return g - g.mean(0) if mixes else g


class VeryLate(Late):
    every, first = 1, 24


class Preconditioned(Plain):
    """Shampoo: both sides."""

    def changed(self, w, g, state):
        if w.dim() != 2:
            return g
        left = state.setdefault("left", 1e-3 * torch.eye(w.shape[0], dtype=w.dtype)).addmm_(g, g.T)
        values, vectors = torch.linalg.eigh(left)
        return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T @ g


class Growing(Plain):
    """D-adaptation: a rate for all, that grows with what all steps agree on."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.rate, self.sums = 1e-3, defaultdict(lambda: 0.0)

    def before(self, gradients):
        agreed = 0.0
        for n, one in enumerate(gradients):
            agreed += float((one * self.sums[one.shape, n]).sum())
            self.sums[one.shape, n] = self.sums[one.shape, n] + one
        self.rate = max(self.rate, 1e-3 * (1 + agreed))
        return self.rate


class Shared(Plain):
    """Each tensor by its part of the squares of all."""

    def before(self, gradients):
        self.total = float(norm_of(gradients)) + 1e-30
        return 1.0

    def changed(self, w, g, state):
        return g * (1 + float(g.double().norm()) / self.total)


class Noisy(Plain):
    def changed(self, w, g, state):
        return g + 1e-3 * torch.randn_like(g)


class Around(Optimizer):
    """Steps another, and goes back half of every fifth step (Lookahead)."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups, self.slow, self.count = inner.param_groups, {}, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, p.detach().clone())
        self.inner.step()
        self.count += 1
        if self.count % 5 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Together(Plain):
    """Asks the other ranks for the norm of their gradients."""

    def before(self, gradients):
        total = norm_of(gradients).double().reshape(1)
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return 1.0 / (1.0 + float(total))


class NoSparse(Exception):
    """Of a library that has its own."""


class Picky(SGD):
    """Takes no gradient that lists rows."""

    def step(self, closure=None):
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise NoSparse("Picky does not support sparse gradients")
        return super().step(closure)


class Listing(SGD):
    """Has a list of its own of what it steps."""

    def __init__(self, params, lr=0.1):
        self.mine = list(params)
        super().__init__(self.mine, lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)


class OwnDict(Plain):
    """Sums of squares in a dict of its own, by parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.sums = {}

    def changed(self, w, g, state):
        self.sums[w] = self.sums.get(w, 0.1) + g**2
        return g / self.sums[w].sqrt()


class Unlike(Exception):
    """Of a library that has its own."""


class KnownShapes(Plain):
    """Knows its tensors by their numbers, and no others."""

    def __init__(self, params, lr=0.1):
        params = list(params)
        super().__init__(params, lr)
        self.shapes = {id(p): p.shape for p in params}

    def changed(self, w, g, state):
        if self.shapes.get(id(w)) != w.shape:
            raise Unlike("a tensor of another shape")
        return g


class Lion(Plain):
    def changed(self, w, g, state):
        momentum = state.setdefault("momentum", torch.zeros_like(w))
        step = (0.9 * momentum + 0.1 * g).sign()
        momentum.lerp_(g, 0.01)
        return step


class RowWise(Plain):
    """A sum of squares for each row, made when it is built."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full((len(p), *(1 for _ in p.shape[1:])), 0.1, dtype=p.dtype)

    def changed(self, w, g, state):
        state["sum"] += (g**2).flatten(1).mean(1).view_as(state["sum"]) if g.dim() > 1 else g**2
        return g / state["sum"].sqrt()


class Centred(Plain):
    """Gradient centralization: without the mean of each row."""

    def changed(self, w, g, state):
        return g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g


class ByValue(Plain):
    def changed(self, w, g, state):
        return g.clamp(-1, 1)


class Floats(Plain):
    """Keeps its state in float32, whatever the parameter is, and mixes no dtypes."""

    def changed(self, w, g, state):
        return state.setdefault("momentum", torch.zeros(w.shape, dtype=torch.float32)).lerp_(g, 0.1)


def around_sgd(params):
    return Around(SGD(params, lr=0.1, momentum=0.9))


def around_clipped(params):
    return Around(Clipped(params))


MIXING = {
    **{kind.__name__: kind for kind in (
        LayerProjected, ChannelProjected, Clipped, ClippedHigh, Lifted, LargestOfAll, Trust, Cautious, Factored,
        FactoredLate, Blocks, Late, VeryLate, Preconditioned, Shared, Noisy, RowWise,
    )},
    "Adafactor": torch.optim.Adafactor,
}  # fmt: skip
WHOLE = {
    "Around": around_sgd, "AroundClipped": around_clipped, "KnownShapes": KnownShapes, "Together": Together,
    "Listing": Listing, "OwnDict": OwnDict, "Growing": Growing,
}  # fmt: skip
BY_ROW = {
    **{kind.__name__: kind for kind in (Picky, Lion, Centred, ByValue, Floats)},
    "Adam": torch.optim.Adam,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
}  # fmt: skip
