"""Training as Lightning modules; `optimizers` alone does not import Lightning (seconds at start-up)."""
