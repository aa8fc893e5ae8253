"""The MLX engine of spill. Importing this package imports neither mlx nor mlx_lm; opening the engine does."""
