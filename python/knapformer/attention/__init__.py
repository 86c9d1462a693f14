"""Attention over packed sequences: the kernels of a balancer that is given none, and what they are called with. Needs
torch."""
