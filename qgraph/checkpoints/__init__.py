"""Checkpoint layouts: one file per layout, to read and to write."""
