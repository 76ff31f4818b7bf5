"""A module per library for ``trainers.py``: what a user writes, and a training of N iterations.

A module ``with_NAME`` has:

- ``TITLE``: the library, as people call it.
- ``BEFORE``, ``AFTER``: what a user has written for that library's DDP, and writes for wingbeat;
  the lines that differ are counted.
- ``train(task, strategy)``: trains ``task.model()`` by the library until ``task.over``, calling
  ``task.tick()`` after each of its iterations, and returns the trained model with the same
  ``state_dict`` as ``task.model()``'s. ``strategy`` is ``"ddp"``, the library's own DDP, or what
  ``task.strategy(strategy)`` makes of it: ``"allreduce"``, ``"dear"``.

It is imported in workers only where it has to import its library, so that the table can be made
without: imports of libraries belong inside of ``train``. Its name is added to ``NAMES``.
"""

NAMES = ("lightning", "fabric", "accelerate", "transformers")
