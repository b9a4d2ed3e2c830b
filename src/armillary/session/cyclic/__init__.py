"""A run under a schedule: building, training, saving and verifying it."""
