"""What a cut should be, in plain loops over neurons: nothing of the library is used here."""

import itertools

import numpy as np


def energies(weight, inputs):
    """e_ij = W_ij^2 E[x_j^2]. weight: (neurons, inputs); inputs: (samples, inputs)."""
    neurons, many = weight.shape
    return np.array([
        [weight[i, j] ** 2 * np.mean([x[j] ** 2 for x in inputs]) for j in range(many)] for i in range(neurons)
    ])  # fmt: skip


def least_assignment(energy, owners, slots, weight_price, value_price):
    """The least cost over all ways to fill the slots, by trying them all."""
    workers = range(len(slots))
    found = []
    for places in itertools.product(workers, repeat=len(energy)):
        if [places.count(worker) for worker in workers] == list(slots):
            found.append(assignment_cost(energy, owners, places, weight_price, value_price))
    return min(found)


def assignment_cost(energy, owners, places, weight_price, value_price):
    total = 0.0
    for i, place in enumerate(places):
        for j, owner in enumerate(owners):
            total += min(energy[i][j], weight_price + value_price * (owner != place))
    return total


def least_pruning(energy, places, owners, weight_price, value_price):
    """(cost, kept) of the best of all ways to keep weights: energy lost, plus weights kept, plus values sent."""
    neurons, inputs = len(places), len(owners)
    best = (np.inf, None)
    for bits in itertools.product((False, True), repeat=neurons * inputs):
        kept = np.array(bits).reshape(neurons, inputs)
        cost = pruning_cost(energy, kept, places, owners, weight_price, value_price)
        if cost < best[0]:
            best = (cost, kept)
    return best


def pruning_cost(energy, kept, places, owners, weight_price, value_price):
    cost = 0.0
    for i in range(len(places)):
        for j in range(len(owners)):
            cost += weight_price if kept[i][j] else energy[i][j]
    return cost + value_price * len(values_sent(kept, places, owners))


def values_sent(kept, places, owners):
    """The pairs (worker, input) that cross."""
    return {
        (places[i], j) for i in range(len(places)) for j in range(len(owners)) if kept[i][j] and owners[j] != places[i]
    }


def adjusted(old, kept, inputs, targets):
    """One neuron's weights and bias: least squares over its kept inputs, pulled by a ridge to the old ones.

    old: (inputs + 1,), the bias last; kept: (inputs,) bool; inputs: (samples, inputs); targets: (samples,).
    """
    x = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    ridge = 1e-4 * np.mean(np.mean(x**2, 0))
    columns = [j for j in range(len(kept)) if kept[j]] + [len(kept)]
    rows = np.concatenate([x[:, columns] / np.sqrt(len(x)), np.sqrt(ridge) * np.eye(len(columns))])
    missing = (targets - x[:, columns] @ old[columns]) / np.sqrt(len(x))
    found = np.linalg.lstsq(rows, np.concatenate([missing, np.zeros(len(columns))]), rcond=None)[0]
    new = np.zeros(len(old))
    new[columns] = old[columns] + found
    return new
