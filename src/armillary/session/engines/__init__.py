"""What carries a plan out, one file for each way."""
