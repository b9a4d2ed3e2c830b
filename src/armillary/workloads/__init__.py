"""Ordinary PyTorch models and data, which import nothing of ours."""
