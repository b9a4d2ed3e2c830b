"""Rows of coming batches are asked for before a forward needs them; entered only where a plan says so."""
