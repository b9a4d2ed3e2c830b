"""Two revisions of this library beside each other: what a change costs or gains in a step."""
