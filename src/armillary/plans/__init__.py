"""What a plan is made of: models, machines, choices, requests, traces. Imports nothing of ours."""
