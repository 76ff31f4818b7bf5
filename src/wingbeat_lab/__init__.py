"""What wingbeat is measured and tried out with, apart from what users train with.

``lab`` emulates a cluster on one machine, ``paced`` has models with real shapes and stated times,
``bench`` compares strategies, ``cli`` adds their verbs to the ``wingbeat`` command. The package
imports wingbeat; wingbeat never imports it.
"""
