"""Claim: a model with large tables trains faster when each parameter travels as its gradient's sparsity asks."""
