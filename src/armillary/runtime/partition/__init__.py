"""A model cut into stages, and what each stage costs."""
