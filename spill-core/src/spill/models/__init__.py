"""Models: found by tag, hub name, packaged GGUF or directory, identified by content, read without torch."""

from spill.models.directory import Model, adapter_targets
from spill.models.resolving import TAGS, default_learning_rate, resolve
from spill.models.text import Text, stop_ids

__all__ = ["TAGS", "Model", "Text", "adapter_targets", "default_learning_rate", "resolve", "stop_ids"]
