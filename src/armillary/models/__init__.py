"""A user's model looked at: its structure, stages, tensors that live. Imports nothing of ours."""
