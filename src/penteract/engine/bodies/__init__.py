"""The bodies: what each word does to tensors. `reference` is plain torch, the truth that other bodies are held to."""
