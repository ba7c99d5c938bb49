"""Parts of `tools/train_demo_model.py`, one noun per file; read `trainer.py` first."""
