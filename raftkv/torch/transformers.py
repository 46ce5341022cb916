"""The public path of ``raftkv.integrations.transformers``: checkpoints of the Hugging Face Trainer in the registry."""

from raftkv.integrations.transformers import RegistryCallback as RegistryCallback
