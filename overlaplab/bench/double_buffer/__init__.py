"""The benchmark of what two of everything wins: `double-buffer`."""
