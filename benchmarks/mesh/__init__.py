"""Meshes over slow links: data parallelism, torch's own tensor parallelism, and every mesh of `armillary.tensor`."""
