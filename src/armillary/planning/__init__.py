"""From facts to a plan: pricing, then the planner. Touches no network."""
