"""Shared code of the integrations with Lightning's packages.

``lightning`` has a Trainer and Fabric; ``pytorch_lightning`` and ``lightning_fabric`` are copies of
them with classes of their own.
"""
