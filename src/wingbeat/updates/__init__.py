"""Updates that belong to one method each."""
