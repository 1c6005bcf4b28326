"""Front ends: what `capture()` calls, one file per source."""
