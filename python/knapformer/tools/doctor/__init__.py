"""`knapformer doctor`: what balancing gains on one's own lengths, compared with what is done now."""
