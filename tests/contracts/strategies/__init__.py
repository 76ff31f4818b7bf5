"""wingbeat is right wherever DDP is right: one scenario, two ways of running it, same weights."""
