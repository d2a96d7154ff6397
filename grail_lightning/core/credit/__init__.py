"""What a credit method is, and those that the training step fuses or that all others build on."""
