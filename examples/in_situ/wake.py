"""A solver: the wake behind a cylinder, by a D2Q9 lattice Boltzmann method in NumPy. It imports no torch.

usage: python wake.py STORE [STEPS]
"""

import itertools
import sys

import numpy as np

from armillary.feeds.writer import Writer

NX, NY, EVERY = 160, 64, 40  # cells, and lattice steps from one snapshot to the next
SPEED, REYNOLDS, RADIUS = 0.1, 120, 7
C = np.array([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [-1, -1], [1, -1]])
W = np.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)
BACK = [0, 3, 4, 1, 2, 7, 8, 5, 6]
OMEGA = 1 / (3 * SPEED * 2 * RADIUS / REYNOLDS + 0.5)
X, Y = np.meshgrid(np.arange(NX), np.arange(NY), indexing="ij")
SOLID = (X - NX // 5) ** 2 + (Y - NY // 2) ** 2 < RADIUS**2
INLET = SPEED * np.stack([1 + 0.05 * np.sin(2 * np.pi * np.arange(NY) / NY), np.zeros(NY)])


def equilibrium(density, velocity):
    along = np.tensordot(C, velocity, axes=1)
    square = 1.5 * (velocity**2).sum(0)
    return W[:, None, None] * density * (1 + 3 * along + 4.5 * along**2 - square)


def steady(snapshot):
    """The inflow, 1 being `SPEED`."""
    return 1.0


def flow(inflow=steady):
    """Velocity, (2, NX, NY), every `EVERY` lattice steps, for ever; `inflow` gives its speed at a snapshot."""
    start = np.repeat(INLET[:, None, :], NX, axis=1)
    f = equilibrium(np.ones((NX, NY)), start)
    for snapshot in itertools.count():
        inlet = inflow(snapshot) * INLET
        for _ in range(EVERY):
            f[[3, 6, 7], -1] = f[[3, 6, 7], -2]  # outflow
            density = f.sum(0)
            velocity = np.tensordot(C.T, f, axes=1) / density
            velocity[:, 0] = inlet
            density[0] = 1.0
            balance = equilibrium(density, velocity)
            f[:, 0] = balance[:, 0]
            after = f - OMEGA * (f - balance)
            after[:, SOLID] = f[BACK][:, SOLID]  # bounced back
            f = np.stack([np.roll(after[i], tuple(C[i]), axis=(0, 1)) for i in range(9)])
        yield np.where(SOLID, 0.0, velocity)


def main(store, steps=400):
    before = None
    with Writer(store, keep=16) as writer:
        for step, velocity in zip(range(steps), flow(), strict=False):
            now = (velocity / SPEED).astype(np.float32)
            if before is not None:
                writer.put(step, {"now": before, "next": now})  # a pair: what a next-frame model learns from
            before = now
            if writer.stop_asked():
                break


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
