"""Replay: drafts against recorded answers, so that S is that of real models' texts and no model has to run."""
