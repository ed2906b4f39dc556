"""Make the optimizer that steps on the master weights: one class, several together, or a user's own."""
