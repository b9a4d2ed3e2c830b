"""One file a framework: the one-process program of `alone.py`, changed as that framework asks."""
