"""`knapformer replay`: every rank's share of a plan, run for real on one device, one after another."""

from __future__ import annotations

from knapformer.replay.shares import AttentionShare, RankShare, shares_of

__all__ = ["AttentionShare", "RankShare", "shares_of"]
