"""What is the case: models, machines, plans, requests, traces. Imports nothing of ours."""
