"""How fast links, processors and exchanges are, timed in the running job."""
