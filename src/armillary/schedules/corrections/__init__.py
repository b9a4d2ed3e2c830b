"""Against what stale weights do to training: correction.py is the contract, then one file per correction."""
