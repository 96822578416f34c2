"""The network, written once over the recorder `do`. It places redistributions, but does not depend on what they do."""
