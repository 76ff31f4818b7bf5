"""Workers that average their models two at a time (AD-PSGD; Ripples, sections 2.3 and 2.4)."""
