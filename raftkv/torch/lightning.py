"""Public import path of ``raftkv.integrations.lightning``: checkpoints of Lightning in the registry."""

from raftkv.integrations.lightning import RegistryCheckpoint as RegistryCheckpoint
