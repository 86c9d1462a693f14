"""`knapformer calibrate`: measures a model's blocks and the group's exchanges, and fits the workload model to them."""
