"""From gradients to buckets: their buffers, their order, and what they travel as."""
