"""Claim: on a link as slow as compute, gradients passed round a ring of staggered workers cost less time than DDP's."""
