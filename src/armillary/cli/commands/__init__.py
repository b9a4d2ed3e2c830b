"""What each command can be asked. Nothing here imports torch: help and refusals must not wait for it."""
