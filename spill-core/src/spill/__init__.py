"""spill: fine-tune a small language model from a folder; stop anywhere, finish anywhere."""

__version__ = "0.1.0"
