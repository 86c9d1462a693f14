"""`knapformer replay`: every rank's share of a plan, run for real on one device, one after another."""
