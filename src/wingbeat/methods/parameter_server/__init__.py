"""Parameter servers (Geryon and its baselines): synchronous training through sharded servers.

The modules of the server process do not import torch: `server`, `aggregator`, `shard_updates`,
`protocol`. With a codec a server also loads `coding`, with an optimizer `shard_optimizer`; both
need torch.
"""
