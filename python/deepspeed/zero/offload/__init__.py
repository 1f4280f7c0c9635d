"""Memory tiers: what they need, how fast they are, moves between them."""
