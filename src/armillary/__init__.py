"""Armillary: plans, runs and checks the training of an ordinary PyTorch model on many workers."""
