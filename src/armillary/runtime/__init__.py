"""Carries a plan out on torch.distributed."""
