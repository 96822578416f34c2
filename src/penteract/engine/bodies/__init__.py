"""The bodies: what each op does to tensors. `reference` is plain torch, the truth that other bodies are held to."""
