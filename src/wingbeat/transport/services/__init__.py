"""Processes that a worker starts beside itself and that speak messages with all. No torch."""
