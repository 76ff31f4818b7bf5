"""A package, so that worker processes can import its cases."""
