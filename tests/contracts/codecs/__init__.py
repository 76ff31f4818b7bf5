"""What every codec must do."""
