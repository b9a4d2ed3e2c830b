"""Parallax's own tables in small: how sparse a model must be for owned rows to pay, what each part of hybrid brings."""
