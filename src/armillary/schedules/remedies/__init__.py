"""Against what stale weights do to training: remedy.py is the contract, then one file per remedy."""
