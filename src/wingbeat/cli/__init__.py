"""Commands of the ``wingbeat`` program; each parses its arguments and calls the library."""
