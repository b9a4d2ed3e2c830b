"""The only room that calls collectives and holds groups."""
