"""Models of mlx-lm, run on token trees. MLX is imported when the first model is loaded."""
