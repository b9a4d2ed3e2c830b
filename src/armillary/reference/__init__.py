"""The slow, obvious truth: one process, plain loops."""
