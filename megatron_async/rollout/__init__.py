"""Rollout: agents in environments against the engines; everything they write is token-exact and versioned."""
