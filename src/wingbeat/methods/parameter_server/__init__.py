"""Parameter servers (Geryon and its baselines): synchronous training through sharded servers.

The modules of the server process load no torch: `server`, `aggregator`, `shard_updates`,
`send_queue`, `failures`, `protocol`, `slicing`. Jobs with a codec also load `coded_aggregator`, and
jobs whose servers run the optimizer `shard_optimizer`; these need torch.
"""
