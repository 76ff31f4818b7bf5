"""Parameter servers (Geryon and its baselines): synchronous training through sharded servers.

The modules of the server process do not import torch: `server`, `aggregator`, `shard_updates`,
`send_queue`, `failures`, `protocol`, `slicing`. With a codec a server also loads
`coded_aggregator`, with an optimizer `shard_optimizer`; both need torch.
"""
