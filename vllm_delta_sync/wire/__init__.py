"""The wire format of docs/protocol.md: dtypes, tensors, state hash, codecs, table, shard, manifest, checkpoints.

Does not read or write a store, and imports neither torch nor vLLM.
"""
