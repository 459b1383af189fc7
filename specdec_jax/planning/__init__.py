"""What programs compiled for a TPU slice cost, without one."""
