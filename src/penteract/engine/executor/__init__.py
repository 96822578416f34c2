"""One rank executes its program: registers, memory, batches, device, and the state that steps change."""
