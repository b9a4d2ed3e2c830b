"""The start of the one line: how long, which plan, and what its forecast is worth."""
