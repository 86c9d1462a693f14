"""Attention over packed sequences: the kernels of a balancer that is given none, and their inputs. Needs torch."""
