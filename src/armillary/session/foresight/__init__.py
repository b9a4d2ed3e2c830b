"""Before and after a run: what the machines can do, what a plan will take on them, and how near the forecast came."""
