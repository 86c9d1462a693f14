"""`knapformer predict`: step times of a mix, or of given lengths, as the cluster grows."""
