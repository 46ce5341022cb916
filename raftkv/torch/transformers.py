"""Public import path of ``raftkv.integrations.transformers``: checkpoints of the Hugging Face Trainer."""

from raftkv.integrations.transformers import RegistryCallback as RegistryCallback
