"""What an operation on a bucket means on the links."""
