"""What `overlaplab doctor` looks at: this machine, torch, NCCL, and their settings."""
