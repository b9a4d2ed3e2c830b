"""Claim: a pipeline that never flushes is as much faster than one that does as the flush's bubble is long."""
