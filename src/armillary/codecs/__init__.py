"""How numbers are written on the wire: codec.py is the contract, then one file per codec."""
