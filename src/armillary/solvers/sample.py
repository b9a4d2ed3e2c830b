"""Samples of an autoregressive model in few passes: the very ones of the loop that goes unknown by unknown.

The noise is drawn first, one number or more for each unknown. So a sample is a function of the noise, and the unknowns
are a triangular system (Song et al., ICML 2021, section 5.3).
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary.solvers.auto import solved_by_trial
from armillary.solvers.checks import refuse_non_causal, refuse_train_mode
from armillary.solvers.methods import IN_ORDER, chosen, completed
from armillary.solvers.system import Solved, Step, System

__all__ = ["sample"]

Draw = Callable[[Tensor, Tensor], Tensor]
CLOSE = 1e-6  # kernels round otherwise for other shapes, so a draw this near to a boundary may fall to its other side


@torch.no_grad()
def sample(
    net: Callable[[Tensor], Tensor],
    shape: tuple[int, int],
    levels: int | None = None,
    seed: int = 0,
    draw: Draw | None = None,
    noise_per_unknown: int = 1,
    dtype: torch.dtype = torch.long,
    method: str = "auto",
    most_sweeps: int = 50,
    report: Callable[[Solved], object] | None = None,
    **options: int,
) -> Tensor:
    """Samples of a causal model: output t depends on inputs before t alone.

    Args:
        net: (n, T) inputs -> (n, T, ...) outputs. It may have `outputs_at(inputs, at)`, the outputs of a slice of
            unknowns alone, and `incremental(samples)`, which begins a loop in order: its step takes t and unknown t-1
            (None before the first) and gives the (n, ...) outputs of t. `Made` has both.
        shape: (n, T) samples and unknowns.
        levels: of categorical unknowns 0 .. levels-1; the outputs are (n, T, levels) logits.
        seed: of the noise, which is the same for every method, type and device.
        draw: in place of levels: (outputs, noise) -> unknowns. It sees (n, K, ...) outputs of some unknowns, and their
            (n, K) uniform numbers, or (n, K, noise_per_unknown) if that is above 1.
        dtype: of the unknowns.
        method: jacobi, gs_jacobi (window=), jacobi_gs (block=), in_order, incremental, or "auto": the fastest of a
            trial, kept for this model, shape and device.
        most_sweeps: so many passes over all unknowns without a proof, and the rest is drawn in order.
        report: is given a `Solved`, as `print` or the `append` of a list take it; its close_calls are counted then.
            Without it a fallback is a warning.
        options: of the method.

    Returns:
        (n, T)

    Raises:
        ValueError: a model that is not causal, draws itself or is in train mode; no such method or option.
    """
    wanted = chosen(method, options, most_sweeps)
    if (levels is None) == (draw is None) or (levels is not None and levels < 1) or noise_per_unknown < 1:
        raise ValueError("sample: want levels of 1 or more, or a draw of your own; and noise_per_unknown of 1 or more")
    refuse_train_mode(net, "sample")
    parameter = next(net.parameters(), None) if isinstance(net, nn.Module) else None
    device = parameter.device if parameter is not None else torch.device("cpu")
    more = (noise_per_unknown,) if noise_per_unknown > 1 else ()
    noise = torch.rand(*shape, *more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    model = _Model(net, draw or _categorical, noise)
    start = torch.zeros(shape, dtype=dtype, device=device).T
    if start.numel():
        refuse_non_causal(net, *_two_fills(model, levels, dtype))
    begin = model.begin if hasattr(net, "incremental") else None
    system = System(model.update, start, begin=begin)
    if wanted.name == "auto" and start.numel():
        solved = solved_by_trial(system, net, most_sweeps)
    else:
        solved = completed(system, IN_ORDER if wanted.name == "auto" else wanted, most_sweeps)
    samples = solved.states.T.contiguous()
    if report is not None:
        report(replace(solved, close_calls=model.close_calls(samples)))
    elif solved.why:
        warnings.warn(f"sample: {solved.said}", stacklevel=2)
    return samples


class _Model:
    """The model, its draw and its noise as a system whose first dimension is the unknowns."""

    def __init__(self, net: Any, draw: Draw, noise: Tensor) -> None:
        self.net, self.draw, self.noise = net, draw, noise

    def update(self, states: Tensor, at: slice) -> Tensor:
        inputs = states.T.contiguous()
        has_part = hasattr(self.net, "outputs_at")
        outputs = self.net.outputs_at(inputs, at) if has_part else self.net(inputs)[:, at]
        return self.draw(outputs, self.noise[:, at]).T

    def begin(self) -> Step:
        step = self.net.incremental(len(self.noise))

        def drawn(t: int, last: Tensor | None) -> Tensor:
            return self.draw(step(t, last)[:, None], self.noise[:, t : t + 1])[:, 0]

        return drawn

    def close_calls(self, samples: Tensor) -> int:
        """Draws that are other ones in float64 if their noise moves by 1e-6."""
        if samples.is_floating_point() or not samples.numel():
            return 0
        outputs = self.net(samples).double()
        moved = [self.draw(outputs, (self.noise + by).clamp(0, 1)) != samples for by in (-CLOSE, CLOSE)]
        return int((moved[0] | moved[1]).sum())


def _categorical(logits: Tensor, noise: Tensor) -> Tensor:
    """Inverse CDF: how many sums of probabilities lie below the noise. Unscaled: a softmax takes thrice as long."""
    sums = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1)
    return (sums[..., :-1] < noise.to(logits.dtype)[..., None] * sums[..., -1:]).sum(-1)


def _two_fills(model: _Model, levels: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two samples to try the model on; every unknown differs where its levels are known."""
    generator, unknowns, device = torch.Generator().manual_seed(0), model.noise.shape[1], model.noise.device
    if levels is not None:
        one = torch.randint(levels, (unknowns,), generator=generator).to(device, dtype)
        return one, (one + 1) % levels
    outputs = model.net(torch.zeros(2, unknowns, dtype=dtype, device=device))
    noise = torch.rand(2, *model.noise.shape[1:], generator=generator, dtype=torch.float64).to(device)
    one, other = model.draw(outputs, noise).to(dtype)
    return one, other
