"""Rows asked for before the forward that reads them."""
