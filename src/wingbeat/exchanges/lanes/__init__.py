"""From worker to worker in order, over all interfaces, and around those that are cut."""
