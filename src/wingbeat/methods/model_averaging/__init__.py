"""Model averaging: Ripples, AD-PSGD, LocalSGD and DiLoCo."""
