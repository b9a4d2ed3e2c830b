"""A solver and training beside each other: how fast snapshots cross, what is learned when, what survives kills."""
