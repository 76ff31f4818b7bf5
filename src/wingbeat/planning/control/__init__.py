"""What is measured and decided while training goes on."""
