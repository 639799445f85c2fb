"""What the course is about: each technique as PyTorch code that is read in minutes."""
