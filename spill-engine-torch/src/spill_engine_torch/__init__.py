"""The PyTorch engines of spill. Importing this package imports neither torch nor transformers; `engine` does."""
