"""Claim: staggered micro-batches on one device hold half the activations that concurrent ones do, evenly over time."""
