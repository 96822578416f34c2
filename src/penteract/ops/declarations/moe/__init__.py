"""Declarations of mixture-of-experts ops: routing, moving tokens, the products of experts, load balancing."""
