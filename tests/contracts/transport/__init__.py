"""What everything that carries bytes must do."""
