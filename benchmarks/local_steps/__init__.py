"""Local steps beside DDP, torch's post-local SGD and PowerSGD, on slow links."""
