"""Ranks as processes of this machine: a pool that lives from call to call."""
