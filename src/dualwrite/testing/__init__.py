"""What dualwrite ships for tests: its own and those of its users."""
