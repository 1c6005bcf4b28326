"""Weight formats: base, then one file per format family."""
