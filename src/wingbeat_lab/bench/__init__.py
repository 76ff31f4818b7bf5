"""Benchmarks of strategies against each other and against PyTorch's own, in one run.

``config`` checks the user's input, ``runner`` starts the workers on a lab and collects results,
``worker`` runs on each host, ``bound`` computes lower bounds of the iteration time. Only ``worker``
and the modules that it imports import torch.
"""
