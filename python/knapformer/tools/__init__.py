"""The command `knapformer`: its subcommands, and what they share."""
