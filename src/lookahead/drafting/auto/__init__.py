"""`preset="auto"`: a search over sources of drafts."""
