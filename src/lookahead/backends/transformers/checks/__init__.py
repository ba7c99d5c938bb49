"""What is asked of a model before it is used: of its kind, of itself, and of the clones that stand for it."""
