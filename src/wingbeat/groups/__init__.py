"""With whom: groups of workers that average their parameters (Ripples), without torch or I/O."""
