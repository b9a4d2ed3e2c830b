"""What a model does with its parameters, seen from outside: reads, rows, and the profile made of them."""
