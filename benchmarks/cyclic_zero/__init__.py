"""Claim: weights that go round a ring twice a step need less memory than whole ones, and no collective waits."""
