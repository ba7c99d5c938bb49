"""Parts of `tools/train_demo_model.py`: its settings, the tokens of the source files, and the training."""
