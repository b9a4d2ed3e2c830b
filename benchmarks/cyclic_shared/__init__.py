"""Claim: sharing devices, model parallel x data parallel keeps its speed and memory per device on half the devices."""
