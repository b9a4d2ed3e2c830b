"""Every candidate of every cell of a grid, forced, forecast and measured: how good the planner's choice is."""
