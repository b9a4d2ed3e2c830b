"""One folder per claim, and the lab they are measured in; run from the root of the repository."""
