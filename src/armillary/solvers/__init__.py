"""A forward pass as a triangular system of equations, solved in parallel: `solve`, `recur`, `sample`, `layers`.

Song, Meng, Liao and Ermon, Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving, ICML 2021.
Everything runs in one process and needs torch alone.
"""

from armillary.solvers.layers import LayerSweeps, layers
from armillary.solvers.made import Made
from armillary.solvers.recur import recur
from armillary.solvers.sample import sample
from armillary.solvers.solve import solve
from armillary.solvers.system import Solved

__all__ = ["LayerSweeps", "Made", "Solved", "layers", "recur", "sample", "solve"]
