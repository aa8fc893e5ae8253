"""Models: found by tag, hub name, packaged GGUF or directory, identified by content, read without torch."""

from spill.models.directory import Model, adapter_targets
from spill.models.resolving import TAGS, at_revision, default_learning_rate, names_directory, resolve
from spill.models.text import stop_ids

__all__ = [
    "TAGS",
    "Model",
    "adapter_targets",
    "at_revision",
    "default_learning_rate",
    "names_directory",
    "resolve",
    "stop_ids",
]
