"""Drafts for engines of others, which run and verify them."""
