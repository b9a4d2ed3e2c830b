"""What a model reads and costs, seen from outside."""
