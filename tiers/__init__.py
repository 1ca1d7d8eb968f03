"""Storage tiers: what a block is, and the media that hold one. Knows nothing of the daemon."""
