"""Measuring on a device: what the simulator, `knapformer calibrate` and `knapformer replay` share. Needs torch."""
