"""What a step costs on top of the model's own: Python of ours, by the clock of the thread that runs it."""
