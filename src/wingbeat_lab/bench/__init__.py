"""Measuring strategies against each other and against what PyTorch brings, in one run.

``config`` checks what the user asked for, ``runner`` starts the workers on a lab and collects,
``worker`` is what runs on each host, ``bound`` says how fast any schedule could be. Only ``worker``
and what it calls import torch.
"""
