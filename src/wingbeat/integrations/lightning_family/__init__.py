"""What the integrations of Lightning's packages share: written once, for four names of them.

``lightning`` has a Trainer and Fabric; ``pytorch_lightning`` and ``lightning_fabric`` are the same
code again, with classes of their own.
"""
