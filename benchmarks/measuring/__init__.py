"""How contenders are measured: alive in one process, by turns, bytes and memory as the kernel counts them."""
