"""How one group of tensors crosses the workers: exchange.py is the contract, then one file per exchange."""
