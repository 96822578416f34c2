"""The executor of one rank's program: registers, memory, batches, device, and the state that steps change."""
