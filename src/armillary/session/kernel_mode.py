"""MKL's reproducible mode, in which a matrix product does not hang on where in memory its operands begin.

Without it a product of the same values may round otherwise at another address (of 120 matrix-vector products in float64
73 did, torch 2.13 on AVX-512), so two runs of one rule may differ in a bit, and no fault is there. With it no product
did. COMPATIBLE, since it is the mode that every x86 processor has. More threads still add up in another order: whoever
compares bits gives both sides as many.

MKL reads the variable at a process's first product and never again.

Source: Intel oneMKL Developer Guide, Obtaining Numerically Reproducible Results.
"""

import os

import torch

__all__ = ["ask_for_repeatable", "is_repeatable"]

VARIABLE, MODE = "MKL_CBWR", "COMPATIBLE"


def ask_for_repeatable() -> None:
    """For this process, if it has made no product yet, and for those that it launches; what the user set stays."""
    os.environ.setdefault(VARIABLE, MODE)


def is_repeatable() -> bool:
    """Whether this process was asked to, or torch is built without MKL, so that there is nothing to ask."""
    return not torch.backends.mkl.is_available() or os.environ.get(VARIABLE, "") not in ("", "OFF")
