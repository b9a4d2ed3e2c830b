"""Owners of parameters: each rank keeps a part, answers pulls and steps with pushes in the order in which they come."""
