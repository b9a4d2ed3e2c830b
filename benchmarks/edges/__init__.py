"""Coded edges of a pipeline beside the same pipeline uncoded, and beside torch's own."""
