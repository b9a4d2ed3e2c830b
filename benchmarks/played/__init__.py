"""Schedules played by the simulator, beside the same schedules carried out on two hosts."""
