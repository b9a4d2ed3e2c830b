"""Tables whose rows are spread over owners: look-ups, handles, gradients, steps."""
