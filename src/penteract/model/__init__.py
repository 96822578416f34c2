"""The network, written once over `do`: it knows where redistributions are, not what they do."""
