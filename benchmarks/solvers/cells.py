"""What each cell measures, as plain data. Times are the shortest of their repetitions, in seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from armillary import solvers
from benchmarks.solvers.models import LEVELS, SIDE, MaskedConvolutions, TanhCell, looped, pixel_by_pixel, trained

MOST_ROUNDS = 50  # of a job of milliseconds
Cell = Callable[[bool], Mapping[str, Any]]
METHODS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("in_order", {}),
    ("jacobi", {}),
    ("gs_jacobi", {"window": 4}),
    ("gs_jacobi", {"window": 8}),
    ("gs_jacobi", {"window": 16}),
    ("jacobi_gs", {"block": 8}),
    ("incremental", {}),
    ("auto", {}),
)  # fmt: skip; a window here is a share of all unknowns


def shortest(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def made(small: bool) -> Mapping[str, Any]:
    """MADE on digits of 28 x 28: the loop over the whole net, and every method."""
    side, samples, steps = (8, 10, 20) if small else (SIDE, 100, 250)
    return _sampling(solvers.Made(side**2, LEVELS, 64 if small else 512), side, samples, steps, METHODS)


def convolutions(small: bool) -> Mapping[str, Any]:
    """Masked convolutions: windows of about a row, and the cached loop."""
    side, samples, steps = (8, 4, 5) if small else (SIDE, 20, 100)
    ways = tuple((name, dict(options)) for name, options in METHODS if name not in ("gs_jacobi", "jacobi_gs", "auto"))
    ways += (("gs_jacobi", {"window": side // 2}), ("gs_jacobi", {"window": side}), ("auto", {}))
    return _sampling(MaskedConvolutions(side), side, samples, steps, ways, windows_are_shares=False)


def _sampling(
    net: Any, side: int, samples: int, steps: int, ways: Sequence[Any], windows_are_shares: bool = True
) -> Any:
    torch.manual_seed(0)
    loss = trained(net, side, steps)
    truth = pixel_by_pixel(net, samples, seed=3)
    seconds = shortest(lambda: pixel_by_pixel(net, samples, 3), 1 if side == SIDE else 2)
    rows = [{"way": "pixel by pixel, whole net", "passes": side**2, "seconds": seconds, "is_equal": True}]
    for name, given in ways:
        options = {
            key: side**2 // value if key == "window" and windows_are_shares else value for key, value in given.items()
        }
        said: list[solvers.Solved] = []

        def call(name=name, options=options, said=said) -> Tensor:
            return solvers.sample(net, (samples, side**2), LEVELS, seed=3, method=name, report=said.append, **options)

        with redirect_stdout(StringIO()):
            images = call()  # "auto" makes its trial
        seconds = shortest(lambda: solvers.sample(net, (samples, side**2), LEVELS, 3, method=name, **options), 2)  # noqa: B023
        way = said[0].method if name != "auto" else f"auto: {said[0].method}"
        rows.append(
            {"way": way, "passes": said[0].passes, "seconds": seconds, "is_equal": torch.equal(images, truth),
             "close_calls": said[0].close_calls}
        )  # fmt: skip
    return {"loss": loss, "samples": samples, "unknowns": side**2, "rows": rows}


def _differentiated(states: Tensor) -> None:
    states.square().sum().backward()


def tanh(small: bool) -> Mapping[str, Any]:
    """The tanh cell forward and backward: the Python loop, nn.RNN, and the methods of `recur`."""
    steps, width = (256, 2) if small else (16384, 2)
    torch.manual_seed(0)
    cell = TanhCell(width, width).double()
    xs, start = torch.randn(steps, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    rnn = nn.RNN(width, width).double()
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(cell.u.T)
        rnn.weight_hh_l0.copy_(cell.w.T)
        rnn.bias_ih_l0.copy_(cell.b)
        rnn.bias_hh_l0.zero_()
    ways: dict[str, Callable[[], Tensor]] = {
        "Python loop": lambda: looped(cell, xs, start),
        "nn.RNN(tanh)": lambda: rnn(xs, start[None])[0],
        "recur, newton": lambda: solvers.recur(cell, xs, start, method="newton"),
        "recur, newton(diagonal=True)": lambda: solvers.recur(cell, xs, start, method="newton", diagonal=True),
        "recur, jacobi": lambda: solvers.recur(cell, xs, start, method="jacobi"),
        "recur, auto": lambda: solvers.recur(cell, xs, start),
    }
    truth = looped(cell, xs, start)
    wanted = torch.autograd.grad(truth.square().sum(), list(cell.parameters()))
    rows = []
    with redirect_stdout(StringIO()):
        for name, call in ways.items():
            states, error = call(), 0.0
            if name != "nn.RNN(tanh)":
                found = torch.autograd.grad(states.square().sum(), list(cell.parameters()))
                error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
            times = 2 if name == "Python loop" else 5
            rows.append({
                "way": name, "forward": shortest(call, times),
                "both": shortest(lambda: _differentiated(call()), times),  # noqa: B023
                "states": float((states - truth).abs().max()), "gradients": error,
            })  # fmt: skip
    return {"steps": steps, "width": width, "rows": rows}


def gru(small: bool) -> Mapping[str, Any]:
    """nn.GRU against `recur` over a GRUCell, forward and backward."""
    rows = []
    for steps in (64,) if small else (256, 1024, 4096, 16384):
        for width in (2,) if small else (1, 2, 4, 8, 16, 32):
            torch.manual_seed(0)
            rnn, cell = nn.GRU(width, width).double(), nn.GRUCell(width, width).double()
            cell.load_state_dict({name.removesuffix("_l0"): value for name, value in rnn.state_dict().items()})
            xs, start = torch.randn(steps, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
            row: dict[str, Any] = {"steps": steps, "width": width}
            row["nn.GRU"] = shortest(lambda: _differentiated(rnn(xs, start[None])[0]), 3)  # noqa: B023
            for name, options in (("newton", {}), ("newton(diagonal=True)", {"diagonal": True})):
                said: list[solvers.Solved] = []

                def call(options=options, said=said) -> Tensor:
                    return solvers.recur(cell, xs, start, method="newton", report=said.append, **options)  # noqa: B023

                states = call()
                assert torch.allclose(states, rnn(xs, start[None])[0], rtol=0, atol=1e-10)
                row[name] = shortest(lambda: _differentiated(call()), 3)
                row[f"{name} passes"] = said[0].passes
            rows.append(row)
    return {"rows": rows}


def auto(small: bool) -> Mapping[str, Any]:
    """20 jobs: each method and what "auto" keeps after its trial, by turns."""
    with redirect_stdout(StringIO()):
        rows = [_by_turns(name, job) for name, job in list(_jobs().items())[:: 7 if small else 1]]
    return {"rows": rows}


def _by_turns(name: str, job: "_Job") -> Mapping[str, Any]:
    ways, taken = {}, {}
    for method, options in job.ways:
        said: list[str] = []
        job.run(method, options, said)  # warms up; a trial, for "auto"
        job.run(method, options, said)
        if "finished in order" not in said[1]:
            ways[method, said[1].partition(":")[0]], taken[method, said[1].partition(":")[0]] = options, []
    slowest = max(shortest(partial(job.run, method, options, []), 1) for (method, _), options in ways.items())
    for _ in range(max(7, min(MOST_ROUNDS, int(0.5 / slowest)))):
        for (method, told), options in ways.items():
            taken[method, told].append(shortest(partial(job.run, method, options, []), 1))
    (kept,) = (told for method, told in ways if method == "auto")
    seconds = {told: min(times) for (method, told), times in taken.items() if method != "auto"}
    return {"job": name, "kept": kept, "auto": min(taken["auto", kept]), "seconds": seconds}


class _Job:
    def __init__(self, run: Callable[[str, Mapping[str, int], list[str]], None], unknowns: int, *more: str) -> None:
        self.run = run
        windows = [("gs_jacobi", {"window": unknowns // share}) for share in (4, 8, 16)]
        given = {
            "diagonal": ("newton", {"diagonal": True}),
            "incremental": ("incremental", {}),
            "newton": ("newton", {}),
        }
        recurs = "newton" in more
        self.ways = [
            ("in_order", {}),
            ("jacobi", {}),
            *([] if recurs else windows),
            *(given[one] for one in more),
            ("auto", {}),
        ]


def _jobs() -> dict[str, _Job]:
    jobs: dict[str, _Job] = {}
    torch.manual_seed(0)
    for unknowns, gain, samples in ((64, 1, 20), (64, 3, 100), (196, 1, 20), (196, 3, 100), (400, 1, 20), (400, 3, 50)):
        net = solvers.Made(unknowns, LEVELS, 256).double()
        with torch.no_grad():
            for one in net.parameters():
                one.mul_(gain)

        def sampled(method, options, said, net=net, shape=(samples, unknowns)) -> None:
            solvers.sample(net, shape, LEVELS, method=method, report=lambda it: said.append(it.said), **options)

        jobs[f"MADE, {unknowns} pixels, batch {samples}, weights x {gain}"] = _Job(sampled, unknowns, "incremental")
    for steps, width, gain, graded in (
        (128, 2, 0.5, True), (1024, 2, 0.5, False), (1024, 2, 0.5, True), (4096, 2, 0.5, True), (1024, 8, 0.5, False),
        (1024, 8, 0.5, True), (4096, 8, 0.9, True), (512, 16, 0.5, True), (1024, 16, 1.6, False), (1024, 16, 1.6, True),
    ):  # fmt: skip
        cell = TanhCell(2, width, gain).double()
        xs, start = torch.randn(steps, 2, dtype=torch.float64) / 4, torch.zeros(width, dtype=torch.float64)

        def recurred(method, options, said, cell=cell, xs=xs, start=start, graded=graded) -> None:
            with torch.set_grad_enabled(graded):
                states = solvers.recur(
                    cell, xs, start, method=method, report=lambda it: said.append(it.said), **options
                )
            if graded:
                _differentiated(states)

        what = "forward and backward" if graded else "forward"
        jobs[f"tanh, T {steps}, D {width}, gain {gain}, {what}"] = _Job(recurred, steps, "newton", "diagonal")
    for unknowns, reads in ((64, 4), (256, 4), (256, 256), (1024, 8)):
        weights = torch.randn(unknowns, unknowns, dtype=torch.float64).tril(-1).triu(-reads) / reads**0.5
        more = torch.randn(unknowns, 8, dtype=torch.float64)

        def solved(method, options, said, weights=weights, more=more) -> None:
            def update(states: Tensor, at: slice) -> Tensor:
                return torch.tanh(weights[at] @ states + more[at])

            said.append(solvers.solve(update, torch.zeros_like(more), method=method, **options).said)

        jobs[f"tanh of the {reads} before, {unknowns} unknowns"] = _Job(solved, unknowns)
    return jobs


CELLS: dict[str, Cell] = {"made": made, "convolutions": convolutions, "tanh": tanh, "gru": gru, "auto": auto}
