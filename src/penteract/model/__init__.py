"""The network, written once over `do`: it knows where seams are, not what they do."""
