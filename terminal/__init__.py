"""What is shown on a terminal, and only there."""
