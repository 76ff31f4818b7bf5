"""All kernels are the same functions: one suite, held against the reference."""
