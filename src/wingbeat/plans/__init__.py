"""What travels together: pure functions from tensors to a `Plan`."""
