"""What tests share; nothing here is a test."""
