"""Where batches of changes become durable: one protocol, an engine on LMDB and one in memory."""
