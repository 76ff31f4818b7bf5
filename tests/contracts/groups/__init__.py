"""What groups promise, whatever carries the bytes."""
