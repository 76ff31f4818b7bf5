"""Parts of strategies that do not exchange gradients in lockstep."""
