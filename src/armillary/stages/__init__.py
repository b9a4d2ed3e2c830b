"""A model cut in stages, and the interpreter of their lists of instructions."""
