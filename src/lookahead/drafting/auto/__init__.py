"""`preset="auto"`: one search over all sources of drafts."""
