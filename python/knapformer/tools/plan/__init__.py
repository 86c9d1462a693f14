"""`knapformer plan`: plans of steps, and what steps of a growing cluster are predicted to take."""
