"""Claim: on slow links a model with large tables trains faster here than with any framework a user has today."""
