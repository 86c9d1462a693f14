"""The training simulator: fake training steps with and without the balancer, on real ranks."""
