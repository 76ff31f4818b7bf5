"""The order in which servers return parameters."""
