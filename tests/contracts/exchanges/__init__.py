"""What an operation on a bucket brings, whoever carries it: one suite."""
